package server

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
)

// completed returns the defaults with places inside a directory of the test.
func completed(t *testing.T) Config {
	t.Helper()
	c := Default()
	c.DataDir = t.TempDir()
	c.Pool = []DeviceConfig{{Path: filepath.Join(c.DataDir, "pool"), Size: 64 << 20}}
	require.NoError(t, c.Complete())
	return c
}

func TestDefaultsAreValid(t *testing.T) {
	c := completed(t)
	require.NoError(t, c.Validate())
	require.Equal(t, "127.0.0.1:7400", c.Advertise)
	require.Equal(t, filepath.Join(c.DataDir, "larder.sock"), c.Socket)
	require.Equal(t, "cxl", c.Pool[0].Tier)
	require.Equal(t, "hardware", c.Pool[0].Coherence)
}

func TestEveryOptionIsDescribedAndSettable(t *testing.T) {
	samples := map[reflect.Type]string{
		reflect.TypeFor[string]():         "x",
		reflect.TypeFor[Secret]():         "x",
		reflect.TypeFor[bool]():           "true",
		reflect.TypeFor[int]():            "7",
		reflect.TypeFor[uint64]():         "7",
		reflect.TypeFor[Size]():           "7KiB",
		reflect.TypeFor[time.Duration]():  "7s",
		reflect.TypeFor[[]PeerConfig]():   "7=host:1/:2/:3",
		reflect.TypeFor[Watermarks]():     "60%,dram=50%,#3=40%",
		reflect.TypeFor[[]DeviceConfig](): "/dev/dax0.0,size=7MiB,tier=dram,coherence=none,force",
	}
	for i, option := range Options() {
		var c Config
		field := reflect.ValueOf(&c).Elem().Field(i)
		require.NotEmpty(t, option.Name)
		require.NotEmpty(t, option.Help, option.Name)
		require.NoError(t, c.Set(option.Name, samples[field.Type()]), option.Name)
		require.False(t, field.IsZero(), "%s was not set", option.Name)
		require.Error(t, c.Set(option.Name+"zzzzzz", "x"))
	}
}

func TestLayersOverrideEachOther(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "larder.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.Join([]string{
		"data_dir: " + dir,
		"cluster_name: file",
		"listen: 127.0.0.1:1111",
		"peer_listen: 127.0.0.1:1112",
		"page_size: 128KiB",
		"peers:",
		"  - 1=127.0.0.1:1112/:1111/:1113",
		"  - {id: 2, addr: '10.0.0.2:7401'}",
		"node_id: 1",
		"pool:",
		"  - {path: " + dir + "/pool, size: 64MiB, coherence: none}",
	}, "\n")), 0o600))
	c, err := Load(file,
		[]string{"LARDER_LISTEN=127.0.0.1:2222", "LARDER_PAGE_SIZE=256KiB", "LARDER_PORT=tcp://1.2.3.4:80", "HOME=/x"},
		map[string][]string{"page_size": {"512KiB"}})
	require.NoError(t, err)
	require.Equal(t, "file", c.ClusterName, "from the file")
	require.Equal(t, "127.0.0.1:2222", c.Listen, "the environment overrides the file")
	require.Equal(t, Size(512<<10), c.PageSize, "a flag overrides the environment")
	require.Equal(t, time.Second, c.ElectionTimeout, "a default stays")
	require.Equal(t, []PeerConfig{
		{ID: 1, Addr: "127.0.0.1:1112", Client: "127.0.0.1:1111", Admin: "127.0.0.1:1113"},
		{ID: 2, Addr: "10.0.0.2:7401", Client: "10.0.0.2:7400", Admin: "10.0.0.2:7402"},
	}, c.Peers)
	require.Equal(t, []DeviceConfig{{Path: dir + "/pool", Size: 64 << 20, Tier: "cxl", Coherence: "none"}}, c.Pool)
}

func TestWrongFilesAreExplained(t *testing.T) {
	tests := []struct{ name, yaml, want string }{
		{"misspelt key", "listn: x", `line 1: unknown key "listn": did you mean "listen"?`},
		{"unheard-of key", "\nthe_answer_to_all: 42", `line 2: unknown key "the_answer_to_all": the keys are node_id,`},
		{"twice", "listen: a\nlisten: b", "line 2: listen was given before, on line 1"},
		{"no unit", "tick: 50", `line 1: tick: duration "50": write a number and a unit`},
		{"no size unit", "page_size: 65536", `line 1: page_size: size "65536": write a number and a unit`},
		{"null", "listen:", "line 1: listen: the value is missing"},
		{"list for a scalar", "listen: [a, b]", "one value is expected, not a list"},
		{"mapping for a list", "pool: {path: x}", `a list is expected`},
		{"key inside a list", "pool:\n  - path: x\n    sise: 1MiB", `line 3: unknown key "sise": did you mean "size"?`},
		{"peer without address", "peers:\n  - id: 3", `peer 3: address "": write host:port`},
		{"not a mapping", "- a", "expected keys with values"},
		{"not YAML", "a: b: c", "not YAML"},
		{"alias", "listen: &a x\nadvertise: *a", "line 2: advertise: one value is expected, written out"},
		{"negative", "max_connections: -1", "not negative"},
		{"watermark of one tier alone", "tier_low: dram=60%", "line 1: tier_low: \"dram=60%\" has no percentage for the other devices"},
		{"watermark of no tier", "tier_low: 70%,hbm=60%", "neither a tier (cxl, dram) nor a device (#3)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Default()
			require.ErrorContains(t, c.ReadYAML([]byte(tt.yaml)), tt.want)
		})
	}
}

func TestAllErrorsAreReportedAtOnce(t *testing.T) {
	c := Default()
	err := c.ReadYAML([]byte("listn: x\ntick: 50\npolicy: lru\n"))
	require.ErrorContains(t, err, "line 1")
	require.ErrorContains(t, err, "line 2")
	require.ErrorContains(t, err, "line 3")
}

// What is wrong with values that can be read is reported beside those that cannot; nothing is said of an option whose own
// value is not known.
func TestUnreadableAndImpossibleValuesAreReportedTogether(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "larder.yaml")
	write := func(lines ...string) {
		lines = append(lines, "data_dir: "+dir, "pool: [{path: "+dir+"/pool, size: 64MiB}]")
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600))
	}
	write("listn: x", "election_timeout: 3s", "min_region_age: 1us")
	_, err := Load(file, nil, nil)
	require.ErrorContains(t, err, `line 1: unknown key "listn"`)
	require.ErrorContains(t, err, "session_ttl: 10s would end sessions during an election")
	require.ErrorContains(t, err, "ttl, min_region_age: whole milliseconds are expected")
	require.Len(t, Problems(err), 3)
	require.Equal(t, `line 1: unknown key "listn": did you mean "listen"?`, Problems(err)[0], "without the file's name")

	write("session_ttl: 60", "election_timeout: 3s", "tick: x")
	_, err = Load(file, nil, nil)
	require.Len(t, Problems(err), 2, "%v", err)
	require.NotContains(t, err.Error(), "during an election", "the default of session_ttl is not what was meant")

	write()
	_, err = Load(file, nil, nil)
	require.NoError(t, err)
	require.Empty(t, Problems(err))
	require.NotNil(t, Problems(err))
}

func TestCoherenceIsNotBelievedOfDevices(t *testing.T) {
	link := filepath.Join(t.TempDir(), "dax")
	require.NoError(t, os.Symlink("/dev/null", link))
	for path, want := range map[string]string{
		"/dev/dax0.0":                      "none", // whether it is there or not
		"/dev/null":                        "none",
		link:                               "none",
		"memfd:x":                          "hardware",
		"/dev/shm/x.pool":                  "hardware",
		filepath.Join(t.TempDir(), "pool"): "hardware",
	} {
		c := Default()
		c.Pool = []DeviceConfig{{Path: path, Size: 64 << 20}}
		require.NoError(t, c.Complete())
		require.Equal(t, want, c.Pool[0].Coherence, path)
	}
	c := Default()
	c.Pool = []DeviceConfig{{Path: "/dev/dax0.0", Size: 64 << 20, Coherence: "hardware"}}
	require.NoError(t, c.Complete())
	require.Equal(t, "hardware", c.Pool[0].Coherence, "who knows better may say so")
}

func TestHelpNamesWhatMayBeChosen(t *testing.T) {
	for _, option := range Options() {
		switch option.Name {
		case "eviction_policy":
			require.Contains(t, option.Help, strings.Join(policy.Names(), ", "))
		case "pool":
			require.Contains(t, option.Help, "force:")
			require.Contains(t, option.Help, "coherence:")
		}
	}
}

func TestConfigurationAsJSONReadsBack(t *testing.T) {
	c := completed(t)
	c.AdminToken = "hunter2"
	c.Peers, c.NodeID = []PeerConfig{{1, "a:1", "a:2", "a:3"}}, 1
	var out bytes.Buffer
	require.NoError(t, c.WriteJSON(&out))
	require.NotContains(t, out.String(), "hunter2")
	require.True(t, json.Valid(out.Bytes()))
	back := Default()
	require.NoError(t, back.ReadYAML(out.Bytes()))
	c.AdminToken = ""
	require.Equal(t, c, back)
}

func TestValidateSaysWhatToDo(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"session", func(c *Config) { c.SessionTTL = 4 * time.Second }, "choose at least 5 times election_timeout: 5s"},
		{"lease", func(c *Config) { c.DefaultLease = 2 * time.Second }, "at most election_timeout (1s)"},
		{"election ticks", func(c *Config) { c.ElectionTimeout = 990 * time.Millisecond }, "not a multiple of tick"},
		{"heartbeat", func(c *Config) { c.HeartbeatInterval = 500 * time.Millisecond }, "no room for a lost heartbeat"},
		{"page", func(c *Config) { c.PageSize = 96 << 10 }, "not a power of two"},
		{"region", func(c *Config) { c.RegionSize = 100 << 10 }, "not a multiple of page_size"},
		{"region pages", func(c *Config) { c.PageSize, c.RegionSize = 4096, 1<<37 }, "choose larger pages"},
		{"policy", func(c *Config) { c.EvictionPolicy = "mru" }, "choose one of"},
		{"address", func(c *Config) { c.Listen = "localhost" }, "write host:port"},
		{"port", func(c *Config) { c.Listen = "localhost:99999" }, "up to 65535"},
		{"same port", func(c *Config) { c.PeerListen = c.Listen }, "a port of their own"},
		{"open admin", func(c *Config) { c.AdminListen = "0.0.0.0:7402" }, "set a token"},
		{"socket path", func(c *Config) { c.Socket = strings.Repeat("s", 108) }, "set a shorter one"},
		{"peers without id", func(c *Config) { c.Peers = []PeerConfig{{1, "a:1", "a:2", "a:3"}} }, "node_id: say which"},
		{"foreign id", func(c *Config) { c.Peers, c.NodeID = []PeerConfig{{1, "a:1", "a:2", "a:3"}}, 2 }, "not among peers"},
		{"id twice", func(c *Config) {
			c.Peers, c.NodeID = []PeerConfig{{1, "a:1", "a:2", "a:3"}, {1, "b:1", "b:2", "b:3"}}, 1
		}, "given twice"},
		{"join and peers", func(c *Config) { c.Join, c.NodeID, c.Peers = true, 1, []PeerConfig{{1, "a:1", "a:2", "a:3"}} }, "leave peers out"},
		{"NUMA node", func(c *Config) { c.DRAMNUMA = "cpu0" }, "write the number of a NUMA node"},
		{"tier", func(c *Config) { c.Pool[0].Tier = "tape" }, "none of cxl, dram, ssd"},
		{"coherence", func(c *Config) { c.Pool[0].Coherence = "software" }, "none of hardware, none"},
		{"device size", func(c *Config) { c.Pool[0].Size = 1 << 20 }, "too small"},
		{"idle", func(c *Config) { c.IdleTimeout = time.Second }, "only send heartbeats"},
		{"grace", func(c *Config) { c.Maru, c.Join, c.MaruOwnerGrace = "0.0.0.0:5555", true, time.Second }, "choose at least 6s"},
		{"level", func(c *Config) { c.LogLevel = "loud" }, "debug, info, warn, error"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := completed(t)
			tt.change(&c)
			require.ErrorContains(t, c.Validate(), tt.want)
		})
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "4096B": 4096, "64KiB": 64 << 10, "64 KiB": 64 << 10, "1.5GiB": 3 << 29, "2TiB": 2 << 40, "5MB": 5e6,
	} {
		got, err := ParseSize(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
		back, err := ParseSize(got.String())
		require.NoError(t, err)
		require.Equal(t, got, back)
	}
	for _, text := range []string{"", "64", "KiB", "-1KiB", "99999999TiB", "1e30GiB", "NaNKiB", "64 KiB x"} {
		_, err := ParseSize(text)
		require.ErrorContains(t, err, "size", text)
	}
}

func TestPrintedConfigurationReadsBackWithoutSecrets(t *testing.T) {
	c := completed(t)
	c.AdminToken = "hunter2"
	c.Peers, c.NodeID = []PeerConfig{{1, "a:1", "a:2", "a:3"}}, 1
	var out bytes.Buffer
	require.NoError(t, c.WriteYAML(&out))
	require.NotContains(t, out.String(), "hunter2")
	back := Default()
	require.NoError(t, back.ReadYAML(out.Bytes()))
	c.AdminToken = ""
	require.Equal(t, c, back)
}

func FuzzConfigYAML(f *testing.F) {
	f.Add([]byte("listen: 127.0.0.1:7400\npool:\n  - 640MiB\n  - {path: /dev/dax0.0, tier: cxl}\n"))
	f.Add([]byte("peers: [1=a:1/:2/:3]\nnode_id: 1\nsession_ttl: 20s"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		c := Default()
		if c.ReadYAML(doc) != nil {
			return
		}
		var out bytes.Buffer
		require.NoError(t, c.WriteYAML(&out))
		back := Default()
		require.NoError(t, back.ReadYAML(out.Bytes()), "%s", out.String())
		c.AdminToken, back.AdminToken = "", ""
		var again bytes.Buffer
		require.NoError(t, back.WriteYAML(&again))
		require.Equal(t, out.String(), again.String())
	})
}
