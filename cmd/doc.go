// Package cmd is the command line of larder: serve, node, replay, sim, ctl, top, bench, transfer, config and version.
//
// A program of your own can register eviction policies and then be the same server:
//
//	func main() {
//		policy.Register("mine", newMine)
//		cmd.Main()
//	}
//
// # Exit codes
//
//	0    done
//	1    failed; standard error says why and what to do
//	2    the command line or the configuration is wrong
//	3    done, and what was looked at is not well: check found problems, or replay read wrong bytes
//	130  interrupted
package cmd
