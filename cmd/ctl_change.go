package cmd

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"larder/client"
	"larder/server"
)

// open opens a client of the cluster for get, put and rm.
func (c *call) open(cfg client.Config) (*client.Client, error) {
	cfg.Addrs = c.Addr
	cfg.Logger = slog.New(slog.NewTextHandler(c.stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	x, err := client.Open(c.ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return x, nil
}

// ctlGet is larder ctl get.
type ctlGet struct {
	keyFlags `embed:""`

	Key  string `arg:"" help:"The entry's key."`
	File string `arg:"" help:"File to write, or - for standard output."`
}

// Run implements the command.
func (g *ctlGet) Run(c *call) (err error) {
	key, err := g.bytes(g.Key)
	if err != nil {
		return err
	}
	x, err := c.open(client.Config{Tenant: g.Tenant})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close(c.ctx)) }()
	value, err := x.Get(c.ctx, key, nil)
	if err != nil {
		return fmt.Errorf("get %s: %w", printable(g.Key), err)
	}
	if g.File == "-" {
		_, err = c.stdout.Write(value) // and no JSON, which would be in the midst of the bytes
		return err                     //nolint:wrapcheck // standard output
	}
	err = writeFile(g.File, func(w io.Writer) error {
		_, err := w.Write(value)
		return err //nolint:wrapcheck // wrapped by writeFile
	})
	if err != nil || !c.JSON {
		return err
	}
	return printJSON(c.stdout, fileReport{g.File, int64(len(value))})
}

// fileReport is what get and snapshot save print as JSON.
type fileReport struct {
	File  string `json:"file"`
	Bytes int64  `json:"bytes"`
}

// writeFile writes a file so that it is there whole or not at all.
func writeFile(path string, write func(w io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
		}
	}()
	if err := write(f); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path) //nolint:wrapcheck // wrapped above
}

// ctlPut is larder ctl put.
type ctlPut struct {
	keyFlags `embed:""`

	Key       string `arg:"" help:"The entry's key."`
	File      string `arg:"" help:"File to read, or - for standard input."`
	Checksums bool   `default:"true" negatable:"" help:"Store a checksum with it (default yes)."`
}

// maxPut bounds what put reads into memory.
const maxPut = 1 << 30

// Run implements the command.
func (p *ctlPut) Run(c *call) (err error) {
	key, err := p.bytes(p.Key)
	if err != nil {
		return err
	}
	var in io.Reader = os.Stdin
	if p.File != "-" {
		f, err := os.Open(p.File)
		if err != nil {
			return fmt.Errorf("put: %w", err)
		}
		defer f.Close() //nolint:errcheck // opened for reading
		in = f
	}
	value, err := io.ReadAll(io.LimitReader(in, maxPut+1))
	if err != nil {
		return fmt.Errorf("put: %w", err)
	}
	if len(value) > maxPut {
		return fmt.Errorf("put: %s is longer than %s", p.File, bytesText(maxPut))
	}
	if len(value) == 0 {
		return fmt.Errorf("put: %s is empty; an entry has at least one byte", p.File)
	}
	cfg := client.Config{Tenant: p.Tenant, Checksums: p.Checksums, PageSize: client.DefaultPageSize}
	pages := (uint64(len(value)) + cfg.PageSize - 1) / cfg.PageSize
	cfg.RegionSize = pages * cfg.PageSize // no more than it needs: the region stays with the entry
	x, err := c.open(cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close(c.ctx)) }()
	result, err := x.Put(c.ctx, key, value)
	if err != nil {
		return fmt.Errorf("put %s: %w", printable(p.Key), err)
	}
	return putReport(c, p.Key, len(value), result)
}

// ctlRm is larder ctl rm.
type ctlRm struct {
	keyFlags `embed:""`

	Key string `arg:"" help:"The entry's key."`
}

// ctlPin is larder ctl pin.
type ctlPin struct {
	keyFlags `embed:""`

	Keys  []string      `arg:"" help:"Keys."`
	Owner string        `default:"operator" help:"Name under which the pin is listed and undone (default operator)."`
	TTL   time.Duration `help:"How long; 0: until it is undone."`
	Soft  bool          `help:"Evict them last, instead of never."`
}

// Run implements the command.
func (p *ctlPin) Run(c *call) error {
	var reply server.PinReply
	in, err := p.request(p.Keys, p.Owner)
	if err != nil {
		return err
	}
	in.TTLMS, in.Soft = uint64(max(p.TTL.Milliseconds(), 0)), p.Soft
	if err := c.admin.post(c.ctx, "/pin", in, &reply); err != nil {
		return err
	}
	return pinReport(c, p.Keys, reply, "pinned", "not found")
}

// ctlUnpin is larder ctl unpin.
type ctlUnpin struct {
	keyFlags `embed:""`

	Keys  []string `arg:"" help:"Keys."`
	Owner string   `default:"operator" help:"Name that they were pinned under (default operator)."`
}

// Run implements the command.
func (p *ctlUnpin) Run(c *call) error {
	var reply server.PinReply
	in, err := p.request(p.Keys, p.Owner)
	if err != nil {
		return err
	}
	if err := c.admin.post(c.ctx, "/unpin", in, &reply); err != nil {
		return err
	}
	return pinReport(c, p.Keys, reply, "unpinned", "was not pinned by "+p.Owner)
}

// request makes what pin and unpin send.
func (f *keyFlags) request(keys []string, owner string) (server.PinRequest, error) {
	in := server.PinRequest{Tenant: f.Tenant, Owner: owner}
	for _, key := range keys {
		if _, err := f.bytes(key); err != nil {
			return in, err
		}
	}
	if f.Hex {
		in.KeysHex = keys
	} else {
		in.Keys = keys
	}
	return in, nil
}

// pinReport prints the outcome for each key. A key of which nothing came makes the command fail.
func pinReport(c *call, keys []string, reply server.PinReply, yes, no string) error {
	if c.JSON {
		if err := printJSON(c.stdout, reply); err != nil {
			return err
		}
	}
	missed := 0
	for i, key := range keys {
		outcome := yes
		if i >= len(reply.Results) || !reply.Results[i] {
			outcome = no
			missed++
		}
		if !c.JSON {
			fmt.Fprintf(c.stdout, "%s: %s\n", printable(key), outcome)
		}
	}
	if missed > 0 {
		return fmt.Errorf("%d of %d keys: %s", missed, len(keys), no)
	}
	return nil
}

// ctlClear is larder ctl clear.
type ctlClear struct {
	All       bool    `help:"Everything."`
	Prefix    *string `help:"Entries whose keys begin with this, of all tenants unless --tenant names one."`
	Hex       bool    `help:"The prefix is given as hexadecimal bytes, as in the key_hex of ctl keys --json."`
	Tenant    string  `help:"Entries of this tenant; with --prefix, those of its keys that begin with it."`
	Model     string  `help:"Entries of this model, by their prefix context."`
	LoRA      string  `name:"lora" help:"Entries of this LoRA, by their prefix context."`
	Salt      string  `help:"Entries of this salt, by their prefix context."`
	BlockSize uint64  `help:"Entries of this block size, by their prefix context."`
	Seed      uint64  `help:"Entries of this hash seed, by their prefix context."`
}

// Run implements the command.
func (l *ctlClear) Run(c *call) error {
	in := server.ClearRequest{All: l.All}
	switch {
	case l.Prefix == nil && l.Hex:
		return usageError(errors.New("clear: --hex goes with --prefix"))
	case l.Prefix == nil:
	case *l.Prefix == "": // perhaps a variable of a script's that was not set
		return usageError(errors.New("clear: every key begins with an empty prefix: to mean that, say --all or --tenant alone"))
	default:
		if _, err := (&keyFlags{Hex: l.Hex}).bytes(*l.Prefix); err != nil {
			return err
		}
		if in.Prefix = *l.Prefix; l.Hex {
			in.Prefix, in.PrefixHex = "", *l.Prefix
		}
	}
	scope := server.ClearContext{
		Tenant: l.Tenant, Model: l.Model, LoRA: l.LoRA, Salt: l.Salt, BlockSize: l.BlockSize, Seed: l.Seed,
	}
	if l.Prefix != nil {
		in.Tenant, scope.Tenant = l.Tenant, ""
	}
	if scope != (server.ClearContext{}) {
		in.Context = &scope
	}
	if (l.All && l.Prefix != nil) || (l.All || l.Prefix != nil) && in.Context != nil {
		return usageError(errors.New(
			"clear: --all goes with nothing else, and --prefix with --tenant alone: run it once for each scope"))
	}
	if !l.All && l.Prefix == nil && in.Context == nil {
		return usageError(errors.New(
			"clear: say what: --all, --prefix, or some of --tenant, --model, --lora, --salt, --block-size, --seed"))
	}
	return c.change("/clear", in)
}

// ctlCheck is larder ctl check.
type ctlCheck struct {
	Deep bool `help:"Read the entries' bytes and compare their checksums."`
}

// Run implements the command.
func (k *ctlCheck) Run(c *call) error {
	var report server.CheckReport
	query := url.Values{"deep": {strconv.FormatBool(k.Deep)}}
	if err := c.admin.getLeader(c.ctx, "/check", query, &report); err != nil {
		return err
	}
	if c.JSON {
		if err := printJSON(c.stdout, report); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(c.stdout, "%d devices, %d regions, %d entries", report.Devices, report.Regions, report.Entries)
		if k.Deep {
			fmt.Fprintf(c.stdout, "; %d verified, %d skipped", report.Verified, report.Skipped)
		}
		fmt.Fprintln(c.stdout)
		for _, d := range report.Foreign {
			if d.Home != "" {
				fmt.Fprintf(c.stdout, "not checked: device %d: %s serves it\n", d.ID, d.Home)
				continue
			}
			fmt.Fprintf(c.stdout, "not checked: device %d, %s: it is attached to host %s; repeat this when a member there leads "+
				"(larder ctl transfer-leader)\n", d.ID, d.Path, d.Node)
		}
		for _, problem := range report.Problems {
			fmt.Fprintln(c.stdout, "problem:", problem)
		}
	}
	if n := len(report.Problems); n > 0 {
		return &exitError{exitUnwell, fmt.Errorf(
			"check found %d problems; entries that are named in them can be dropped with larder ctl rm", n)}
	}
	return nil
}

// ctlDrainClient is larder ctl drain client.
type ctlDrainClient struct {
	Instance string `arg:"" help:"The client's instance name; larder ctl clients lists them."`
}

// Run implements the command.
func (d *ctlDrainClient) Run(c *call) error {
	var reply server.DrainReply
	if err := c.admin.post(c.ctx, "/drain", server.DrainRequest{Instance: d.Instance}, &reply); err != nil {
		return err
	}
	if c.JSON {
		if err := printJSON(c.stdout, reply); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(c.stdout, "%s was asked to give up %d regions\n", d.Instance, reply.Regions)
		for _, k := range reply.Kept {
			fmt.Fprintf(c.stdout, "not asked for region %d: %s\n", k.Region, k.Reason)
		}
	}
	if n := len(reply.Kept); n > 0 {
		return fmt.Errorf("%d of %d regions stay with %s: undo what keeps them, then drain again", n, n+reply.Regions, d.Instance)
	}
	return nil
}

// ctlPolicy is larder ctl policy.
type ctlPolicy struct {
	Get ctlPolicyGet `cmd:"" default:"1" help:"Show the settings."`
	Set ctlPolicySet `cmd:"" help:"Change the eviction policy and other settings, for the whole cluster."`
}

// ctlPolicyGet is larder ctl policy get.
type ctlPolicyGet struct{}

// Run implements the command.
func (p *ctlPolicyGet) Run(c *call) error {
	var s server.SettingsView
	if err := c.admin.getLeader(c.ctx, "/policy", nil, &s); err != nil {
		return err
	}
	return printSettings(c, &s)
}

// printSettings shows the replicated settings.
func printSettings(c *call, s *server.SettingsView) error {
	if c.JSON {
		return printJSON(c.stdout, s)
	}
	return pairs(c.stdout,
		[2]string{"policy", s.Policy},
		[2]string{"ttl", millis(int64(s.TTLMS))}, //nolint:gosec // a duration
		[2]string{"page size", bytesText(s.PageSize)},
		[2]string{"region size", bytesText(s.RegionSize)},
		[2]string{"max regions per client", strconv.FormatUint(s.MaxRegionsPerInstance, 10)},
		[2]string{"min region age", millis(int64(s.MinRegionAgeMS))}, //nolint:gosec // a duration
		[2]string{"tier low", lowText(s)},
		[2]string{"promote after", fmt.Sprintf("%d uses", s.PromoteAfter)},
		[2]string{"promote most", limitText(s.PromoteMost, "")},
		[2]string{"promote rate", limitText(s.PromoteRate, "/s")},
		[2]string{"cluster version", strconv.FormatUint(uint64(s.Version), 10)},
	)
}

// lowText is the watermarks as --tier-low takes them.
func lowText(s *server.SettingsView) string {
	text := fmt.Sprintf("%d%%", s.TierLow)
	if s.TierLows != "" {
		text += "," + s.TierLows
	}
	return text
}

// limitText is a number of bytes, per something, of which 0 means any.
func limitText(n uint64, per string) string {
	if n == 0 {
		return "no limit"
	}
	return bytesText(n) + per
}

// ctlPolicySet is larder ctl policy set.
type ctlPolicySet struct {
	Policy                string             `arg:"" optional:"" help:"Eviction policy."`
	TTL                   *time.Duration     `help:"Life of entries that name none, under the ttl policy."`
	PageSize              *server.Size       `help:"Page size for clients that name none."`
	RegionSize            *server.Size       `help:"Region size for clients that name none."`
	MaxRegionsPerInstance *uint64            `help:"Regions that one client may own; 0: no limit."`
	MinRegionAge          *time.Duration     `help:"Age before which a live client's region is not taken from it."`
	TierLow               *server.Watermarks `help:"Percent of a device in use from which on its cold end is copied to a slower tier, and those of tiers and devices that differ, as in 70%,dram=60%,#3=50%; 100%: never."`
	PromoteAfter          *uint64            `help:"Uses of an entry in the slowest tier after which readers put a copy in a faster one; 0: never."`
	PromoteMost           *server.Size       `help:"Bytes of the largest entry of which readers do that; 0: no limit."`
	PromoteRate           *server.Size       `help:"Bytes per second that each client is asked to copy so; 0: no limit."`
}

// Run implements the command.
func (p *ctlPolicySet) Run(c *call) error {
	var in server.PolicyRequest
	if p.Policy != "" {
		in.Policy = &p.Policy
	}
	in.TTLMS, in.MinRegionAgeMS = milliseconds(p.TTL), milliseconds(p.MinRegionAge)
	in.PageSize, in.RegionSize = (*uint64)(p.PageSize), (*uint64)(p.RegionSize)
	in.MaxRegionsPerInstance = p.MaxRegionsPerInstance
	if p.TierLow != nil {
		in.TierLow, in.TierLows = p.TierLow.Split()
	}
	in.PromoteAfter = p.PromoteAfter
	in.PromoteMost, in.PromoteRate = (*uint64)(p.PromoteMost), (*uint64)(p.PromoteRate)
	if in == (server.PolicyRequest{}) {
		return usageError(errors.New("policy set: name a policy or an option to change"))
	}
	var s server.SettingsView
	if err := c.admin.post(c.ctx, "/policy", in, &s); err != nil {
		return err
	}
	return printSettings(c, &s)
}

// milliseconds converts an optional duration.
func milliseconds(d *time.Duration) *uint64 {
	if d == nil {
		return nil
	}
	ms := uint64(max(d.Milliseconds(), 0))
	return &ms
}

// ctlUpgrade is larder ctl upgrade.
type ctlUpgrade struct {
	To uint32 `help:"Version; 0: the newest that the leader's binary speaks."`
}

// Run implements the command.
func (u *ctlUpgrade) Run(c *call) error {
	var s server.SettingsView
	if err := c.admin.post(c.ctx, "/cluster-version", server.VersionRequest{Version: u.To}, &s); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, s)
	}
	fmt.Fprintf(c.stdout, "cluster version %d; a release that lacks it can no longer join\n", s.Version)
	return nil
}

// ctlSnapshot is larder ctl snapshot.
type ctlSnapshot struct {
	Save    ctlSnapshotSave    `cmd:"" help:"Save the index to a file. The bytes of entries are not part of it: they stay on the devices."`
	Restore ctlSnapshotRestore `cmd:"" help:"Make a data directory of a saved file, as a new cluster of one member. Works without a server."`
}

// ctlSnapshotSave is larder ctl snapshot save.
type ctlSnapshotSave struct {
	File string `arg:"" help:"File to write."`
}

// Run implements the command.
func (s *ctlSnapshotSave) Run(c *call) error {
	var size int64
	err := writeFile(s.File, func(w io.Writer) error {
		return c.admin.anyone(func(addr string) error {
			response, err := c.admin.do(c.ctx, addr, http.MethodPost, "/snapshot", []byte("{}"))
			if err != nil {
				return err
			}
			defer response.Body.Close() //nolint:errcheck // opened for reading
			size, err = io.Copy(w, response.Body)
			if err != nil {
				return fmt.Errorf("the snapshot was cut off; the server's log says why: %w", err)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, fileReport{s.File, size})
	}
	fmt.Fprintf(c.stdout, "%s: %s\n", s.File, bytesText(uint64(size))) //nolint:gosec // not negative
	return nil
}

// Run implements the command.
func (r *ctlRm) Run(c *call) (err error) {
	key, err := r.bytes(r.Key)
	if err != nil {
		return err
	}
	x, err := c.open(client.Config{Tenant: r.Tenant})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close(c.ctx)) }()
	removed, err := x.Delete(c.ctx, key)
	if err != nil {
		return fmt.Errorf("rm %s: %w", printable(r.Key), err)
	}
	done := len(removed) > 0 && removed[0]
	if c.JSON {
		if err := printJSON(c.stdout, map[string]bool{"removed": done}); err != nil {
			return err
		}
	}
	if !done {
		return fmt.Errorf("rm %s: not found, or pinned; larder ctl pins lists the pins", printable(r.Key))
	}
	if !c.JSON {
		fmt.Fprintln(c.stdout, "removed")
	}
	return nil
}

// putReport tells what became of a put.
func putReport(c *call, key string, size int, result client.PutResult) error {
	switch {
	case result.Err != nil:
		return fmt.Errorf("put %s: %w", printable(key), result.Err)
	case c.JSON:
		return printJSON(c.stdout, map[string]any{"stored": result.Stored, "bytes": size})
	case result.Stored:
		fmt.Fprintf(c.stdout, "stored %s\n", bytesText(uint64(size))) //nolint:gosec // not negative
	default:
		fmt.Fprintln(c.stdout, "held already; nothing was changed: rm it first to store other bytes")
	}
	return nil
}

// ctlSnapshotRestore is larder ctl snapshot restore.
type ctlSnapshotRestore struct {
	configFlags `embed:""`

	Snapshot string `arg:"" name:"file" type:"existingfile" help:"File that snapshot save wrote."`
}

// restoreReport is what snapshot restore --json prints.
type restoreReport struct {
	DataDir string `json:"data_dir"`
	Index   uint64 `json:"index"` // log index of the state
	NodeID  uint64 `json:"node_id"`
}

// Run implements the command.
func (s *ctlSnapshotRestore) Run(c *call) error {
	cfg, err := s.load()
	if err != nil {
		return err
	}
	f, err := os.Open(s.Snapshot)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	index, err := server.Restore(&cfg, f, newLogger(c.stderr, &cfg))
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if c.JSON {
		return printJSON(c.stdout, restoreReport{cfg.DataDir, index, cfg.NodeID})
	}
	fmt.Fprintf(c.stdout, "%s holds the state at log index %d, as member %d of a new cluster; start it with larder serve --data-dir %s\n",
		cfg.DataDir, index, cfg.NodeID, cfg.DataDir)
	return nil
}
