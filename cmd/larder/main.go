// Command larder is a storage server for the KV cache of LLM serving engines, and the tools around it: see
// larder --help, or package larder/cmd for how to build one with policies of your own.
package main

import "larder/cmd"

func main() { cmd.Main() }
