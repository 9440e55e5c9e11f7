package cmd

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"larder/meta"
	"larder/protocol"
	"larder/server"
)

// commit is stamped by make build; go install leaves it to the build information.
var commit string

// The server tells clients, members and scrapers the same version as the command line does.
func init() { server.Version = version() }

// version names this binary: the module's version, and the commit where one is known.
func version() string {
	v, revision, modified := "devel", commit, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if info.Main.Version != "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && revision == "":
				revision = s.Value[:min(len(s.Value), 12)]
			case s.Key == "vcs.modified" && s.Value == "true":
				modified = "+changes"
			}
		}
	}
	if revision == "" {
		return v
	}
	return v + "-" + revision + modified
}

// versionCmd is larder version.
type versionCmd struct {
	JSON bool `help:"Print JSON."`
}

// Run implements the command.
func (c *versionCmd) Run(e *env) error {
	v := server.VersionReply{
		Version: version(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Protocol: protocol.Version, ClusterVersion: meta.ClusterVersion,
	}
	if c.JSON {
		return printJSON(e.stdout, v)
	}
	fmt.Fprintf(e.stdout, "larder %s, %s, %s, protocol %d, cluster version %d\n",
		v.Version, v.Go, v.Platform, v.Protocol, v.ClusterVersion)
	return nil
}
