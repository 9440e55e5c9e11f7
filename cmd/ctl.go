package cmd

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"larder/server"
)

// ctlCmd is larder ctl.
type ctlCmd struct {
	clusterFlags `embed:""`

	Status         ctlStatus   `cmd:"" help:"Leader, term, log, disk, pool and policy."`
	Members        ctlMembers  `cmd:"" help:"List, add, promote and remove members."`
	TransferLeader ctlTransfer `cmd:"" help:"Hand leadership to a member, or to the one that is furthest."`
	Devices        ctlDevices  `cmd:"" help:"List devices: where they are, how full, and how they are used."`
	Regions        ctlRegions  `cmd:"" help:"List regions."`
	Clients        ctlClients  `cmd:"" help:"List clients' sessions."`
	Keys           ctlKeys     `cmd:"" help:"List entries."`
	Names          ctlNames    `cmd:"" help:"List names: what processes tell each other of themselves."`
	Get            ctlGet      `cmd:"" help:"Write an entry's bytes to a file."`
	Put            ctlPut      `cmd:"" help:"Store a file's bytes as an entry."`
	Rm             ctlRm       `cmd:"" help:"Delete an entry."`
	Pin            ctlPin      `cmd:"" help:"Keep entries from being evicted."`
	Unpin          ctlUnpin    `cmd:"" help:"Undo it."`
	Pins           ctlPins     `cmd:"" help:"List pins: operators', and those of clients' sessions."`
	Clear          ctlClear    `cmd:"" help:"Drop entries by key prefix or context, or all."`
	Snapshot       ctlSnapshot `cmd:"" help:"Save the index to a file, and restore it."`
	Check          ctlCheck    `cmd:"" help:"Compare the index with the devices."`
	Drain          ctlDrain    `cmd:"" help:"Give up a device or a node, or take all regions from a client."`
	Copy           ctlCopy     `cmd:"" help:"Copy entries to a tier, a device or a node."`
	Move           ctlMove     `cmd:"" help:"Move entries to a tier, a device or a node."`
	Tasks          ctlTasks    `cmd:"" help:"List and end what is copied between devices."`
	Policy         ctlPolicy   `cmd:"" help:"Show and change the replicated settings."`
	Tenants        ctlTenants  `cmd:"" help:"List tenants, and change their limits."`
	Upgrade        ctlUpgrade  `cmd:"" help:"Raise the cluster version, when every member runs the new release."`
}

// call is what a ctl subcommand works with.
type call struct {
	*env
	*clusterFlags

	ctx   context.Context //nolint:containedctx // with the timeout of the command
	admin *admin
}

// timeout is how long the command may take.
func (c *ctlCmd) timeout(command string) time.Duration {
	switch {
	case c.Timeout > 0:
		return c.Timeout
	case strings.HasPrefix(command, "ctl snapshot"), strings.HasPrefix(command, "ctl check"), c.waits():
		return longTimeout
	default:
		return shortTimeout
	}
}

// waits reports whether the command waits for bytes to be copied.
func (c *ctlCmd) waits() bool {
	return c.Drain.Device.Wait || c.Drain.Node.Wait || c.Copy.Wait || c.Move.Wait
}

// Default timeouts of commands that are decided at once, and of those that read the whole pool or index.
const (
	shortTimeout = 30 * time.Second
	longTimeout  = time.Hour
)

// ctlStatus is larder ctl status.
type ctlStatus struct{}

// Run implements the command.
func (s *ctlStatus) Run(c *call) error {
	var reply server.StatusReply
	if err := c.admin.getLeader(c.ctx, "/status", nil, &reply); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	x := &reply.Stats
	leader := "none known"
	if reply.Leader != 0 {
		leader = strconv.FormatUint(reply.Leader, 10)
	}
	disk := fmt.Sprintf("%s free of %s", bytesText(reply.Disk.AvailBytes), bytesText(reply.Disk.TotalBytes))
	if reply.Disk.Full {
		disk += "; FULL: changes are refused"
	}
	err := pairs(c.stdout,
		[2]string{"cluster", fmt.Sprintf("%s (%s), version %d", reply.ClusterName, reply.ClusterID, reply.Settings.Version)},
		[2]string{"answered by", fmt.Sprintf("member %d, %s, up %s, %s", reply.NodeID, reply.Role, millis(reply.UptimeMS), reply.Version)},
		[2]string{"leader", fmt.Sprintf("%s, term %d", leader, reply.Term)},
		[2]string{"log", fmt.Sprintf("committed %d, applied %d, held %d to %d",
			reply.Commit, reply.Applied, reply.FirstIndex, reply.LastIndex)},
		[2]string{"state", fmt.Sprintf("hash %s, incarnation %d", reply.StateHash, reply.Incarnation)},
		[2]string{"disk", disk},
		[2]string{"pool", fmt.Sprintf("%s: %s, %s in regions (%s)", reply.Pool, bytesText(x.PoolBytes),
			bytesText(x.PoolBytes-min(x.FreeBytes, x.PoolBytes)), percent(x.PoolBytes-min(x.FreeBytes, x.PoolBytes), x.PoolBytes))},
		[2]string{"entries", fmt.Sprintf("%d, %s", x.Entries, bytesText(x.EntryBytes))},
		[2]string{"clients", fmt.Sprintf("%d open, %d ended with regions left, %d connections",
			x.Sessions, x.ClosedSessions, reply.Connections)},
		[2]string{"policy", settingsText(&reply.Settings)},
		[2]string{"evicted", evictionsText(x)},
	)
	if err != nil {
		return err
	}
	fmt.Fprintln(c.stdout)
	if err := membersTable(reply.Members).print(c.stdout); err != nil {
		return err
	}
	fmt.Fprintln(c.stdout)
	return devicesTable(reply.Devices).print(c.stdout)
}

// settingsText is one line of the replicated settings.
func settingsText(s *server.SettingsView) string {
	text := fmt.Sprintf("%s, pages of %s, regions of %s", s.Policy, bytesText(s.PageSize), bytesText(s.RegionSize))
	if s.MaxRegionsPerInstance > 0 {
		text += fmt.Sprintf(", at most %d a client", s.MaxRegionsPerInstance)
	}
	if s.TTLMS > 0 {
		text += ", ttl " + millis(int64(s.TTLMS)) //nolint:gosec // a duration
	}
	return text
}

// evictionsText is one line about what was evicted.
func evictionsText(x *server.StatsView) string {
	if len(x.Evictions) < 4 {
		return "-"
	}
	return fmt.Sprintf("%d own entries, %d of clients that left; %d of others", x.Evictions[1], x.Evictions[2], x.Evictions[3])
}

// membersTable shows members.
func membersTable(members []server.MemberStatus) *table {
	t := newTable("-MEMBER", "ROLE", "PEERS", "CLIENTS", "ADMIN", "ACTIVE", "-LAG")
	for i := range members {
		m := &members[i]
		role := "voter"
		switch {
		case m.Leader:
			role = "leader"
		case m.Learner:
			role = "learner"
		}
		t.row(m.ID, role, m.Addr, m.Client, m.Admin, m.Active, m.Lag)
	}
	return t
}

// ctlMembers is larder ctl members.
type ctlMembers struct {
	List    ctlMembersList    `cmd:"" default:"1" help:"List members."`
	Add     ctlMembersAdd     `cmd:"" help:"Add a member, as a learner unless --voter; then start it with --join and the id that is printed."`
	Promote ctlMembersPromote `cmd:"" help:"Make a learner that has caught up a voter."`
	Remove  ctlMembersRemove  `cmd:"" help:"Remove a member for ever."`
}

// ctlMembersList is larder ctl members list.
type ctlMembersList struct{}

// Run implements the command.
func (m *ctlMembersList) Run(c *call) error {
	var members []server.MemberStatus
	if err := c.admin.getLeader(c.ctx, "/members", nil, &members); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, members)
	}
	return membersTable(members).print(c.stdout)
}

// ctlMembersAdd is larder ctl members add.
type ctlMembersAdd struct {
	PeerAddr   string `arg:"" help:"Its address for the other members, host:port."`
	ClientAddr string `help:"Its address for clients (default: the same host, port 7400)."`
	AdminAddr  string `help:"Its admin address (default: the same host, port 7402)."`
	ID         uint64 `help:"Its id; 0: a random one, which is printed."`
	Voter      bool   `help:"Add it as a voter at once. Safer: as a learner, and promote it when it has caught up."`
}

// Run implements the command.
func (m *ctlMembersAdd) Run(c *call) error {
	var reply server.MemberReply
	err := c.admin.post(c.ctx, "/members", server.MemberRequest{
		ID: m.ID, Addr: m.PeerAddr, Client: m.ClientAddr, Admin: m.AdminAddr, Voter: m.Voter,
	}, &reply)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	fmt.Fprintf(c.stdout, "added member %d; start it with: larder serve --join --node-id %d --peer-listen %s\n",
		reply.ID, reply.ID, m.PeerAddr)
	return nil
}

// ctlMembersPromote is larder ctl members promote.
type ctlMembersPromote struct {
	ID uint64 `arg:"" help:"The member's id."`
}

// Run implements the command.
func (m *ctlMembersPromote) Run(c *call) error {
	return c.change("/members/promote", server.MemberRequest{ID: m.ID})
}

// ctlMembersRemove is larder ctl members remove.
type ctlMembersRemove struct {
	ID uint64 `arg:"" help:"The member's id."`
}

// Run implements the command.
func (m *ctlMembersRemove) Run(c *call) error {
	return c.change("/members/remove", server.MemberRequest{ID: m.ID})
}

// change posts a request whose reply says nothing.
func (c *call) change(path string, in any) error {
	var done server.Done
	if err := c.admin.post(c.ctx, path, in, &done); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, done)
	}
	fmt.Fprintln(c.stdout, "done")
	return nil
}

// ctlTransfer is larder ctl transfer-leader.
type ctlTransfer struct {
	To uint64 `arg:"" optional:"" help:"The new leader's id."`
}

// Run implements the command.
func (t *ctlTransfer) Run(c *call) error {
	return c.change("/transfer-leader", server.MemberRequest{To: t.To})
}

// ctlRegions is larder ctl regions.
type ctlRegions struct {
	Limit int    `default:"1000" help:"Most regions to list (default 1000)."`
	After uint64 `help:"List regions with higher ids than this, as printed by the last call."`
}

// Run implements the command.
func (r *ctlRegions) Run(c *call) error {
	all := []server.RegionStatus{}
	after := r.After
	for len(all) < r.Limit {
		var page server.RegionsReply
		query := url.Values{"after": {strconv.FormatUint(after, 10)}, "limit": {strconv.Itoa(min(r.Limit-len(all), 1000))}}
		if err := c.admin.getLeader(c.ctx, "/regions", query, &page); err != nil {
			return err
		}
		all = append(all, page.Regions...)
		if after = page.Next; after == 0 {
			break
		}
	}
	if c.JSON {
		if after != 0 { // the list has no place for it
			fmt.Fprintf(c.stderr, "larder: there are more regions: --after %d, or a higher --limit\n", after)
		}
		return printJSON(c.stdout, all)
	}
	t := newTable("-REGION", "STATE", "INSTANCE", "-SESSION", "-DEVICE", "-OFFSET", "-LENGTH", "-PAGE", "-EPOCH", "-ENTRIES",
		"-BYTES", "-PINNED", "-AGE", "-LEASED")
	for i := range all {
		x := &all[i]
		t.row(x.ID, x.State, x.Instance, x.Session, x.Device, bytesText(x.Offset), bytesText(x.Length), bytesText(x.PageSize), x.Epoch,
			x.Entries, bytesText(x.Bytes), x.Pinned, millis(int64(x.AgeMS)), millis(x.LeasedMS)) //nolint:gosec // a duration
	}
	if err := t.print(c.stdout); err != nil {
		return err
	}
	if after != 0 {
		fmt.Fprintf(c.stdout, "more: --after %d, or a higher --limit\n", after)
	}
	return nil
}

// ctlClients is larder ctl clients.
type ctlClients struct{}

// Run implements the command.
func (l *ctlClients) Run(c *call) error {
	var clients []server.ClientStatus
	if err := c.admin.getLeader(c.ctx, "/clients", nil, &clients); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, clients)
	}
	t := newTable("-SESSION", "INSTANCE", "TENANT", "STATE", "-REGIONS", "-PINS", "-CONNECTIONS", "-TTL", "-EXPIRES", "-PID")
	for i := range clients {
		x := &clients[i]
		state := "open"
		switch {
		case x.Fenced:
			state = "fenced"
		case !x.Open:
			state = "ended"
		}
		expires := "-"
		if x.ExpiresMS >= 0 {
			expires = millis(x.ExpiresMS)
		}
		t.row(x.Session, x.Instance, x.Tenant, state, x.Regions, x.Pins, x.Connections, millis(int64(x.TTLMS)), expires, x.PID) //nolint:gosec // a duration
	}
	return t.print(c.stdout)
}

// keyFlags say what keys on a command line mean.
type keyFlags struct {
	Tenant string `help:"Whose keys (default: the default tenant)."`
	Hex    bool   `help:"Keys are given as hexadecimal bytes, as in the key_hex of ctl keys --json."`
}

// bytes reads a key of the command line.
func (f *keyFlags) bytes(key string) ([]byte, error) {
	if !f.Hex {
		return []byte(key), nil
	}
	b, err := hex.DecodeString(key)
	if err != nil {
		return nil, usageError(fmt.Errorf("key %q is not hexadecimal: leave --hex out for keys that are text", key))
	}
	return b, nil
}

// ctlKeys is larder ctl keys.
type ctlKeys struct {
	Tenant string `help:"Only this tenant's (default: of all tenants)."`
	Prefix string `help:"Only keys that begin with this."`
	Hex    bool   `help:"The prefix is given as hexadecimal bytes, and keys are shown so."`
	Limit  int    `default:"100" help:"Most entries to list (default 100)."`
	Cursor uint64 `help:"Where to go on, as printed by the last call."`
}

// Run implements the command.
func (k *ctlKeys) Run(c *call) error {
	prefix, err := (&keyFlags{Hex: k.Hex}).bytes(k.Prefix)
	if err != nil {
		return err
	}
	reply := server.KeysReply{Keys: []server.KeyView{}, Next: k.Cursor}
	for len(reply.Keys) < k.Limit {
		var page server.KeysReply
		query := url.Values{
			"tenant": {k.Tenant}, "prefix": {string(prefix)}, "cursor": {strconv.FormatUint(reply.Next, 10)},
			"limit": {strconv.Itoa(min(k.Limit-len(reply.Keys), 1000))},
		}
		if err := c.admin.getLeader(c.ctx, "/keys", query, &page); err != nil {
			return err
		}
		reply.Keys = append(reply.Keys, page.Keys...)
		if reply.Next = page.Next; reply.Next == 0 {
			break
		}
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	t := newTable("TENANT", "KEY", "-LENGTH", "-REGION", "-OFFSET", "-DEVICE", "CHECKSUM", "CLASS", "-PINS")
	for i := range reply.Keys {
		x := &reply.Keys[i]
		t.row(printable(x.Tenant), keyText(x.Key, x.KeyHex, k.Hex), x.Length, x.Region, x.Offset, x.Device, x.Checksum, x.Class, x.Pins)
	}
	if err := t.print(c.stdout); err != nil {
		return err
	}
	if reply.Next != 0 {
		fmt.Fprintf(c.stdout, "more: --cursor %d\n", reply.Next)
	}
	return nil
}

// ctlPins is larder ctl pins.
type ctlPins struct {
	Tenant string `help:"Only of this tenant's entries (default: of all tenants)."`
	Owner  string `help:"Only those that were made under this name (default: all)."`
	Hex    bool   `help:"Show keys as hexadecimal bytes."`
	Limit  int    `default:"100" help:"About how many pins to list at most; all of an entry are listed together (default 100)."`
	Cursor uint64 `help:"Where to go on, as printed by the last call."`
}

// Run implements the command.
func (p *ctlPins) Run(c *call) error {
	reply := server.PinsReply{Pins: []server.PinView{}, Next: p.Cursor}
	for len(reply.Pins) < p.Limit {
		var page server.PinsReply
		query := url.Values{
			"tenant": {p.Tenant}, "owner": {p.Owner}, "cursor": {strconv.FormatUint(reply.Next, 10)},
			"limit": {strconv.Itoa(min(p.Limit-len(reply.Pins), 1000))},
		}
		if err := c.admin.getLeader(c.ctx, "/pins", query, &page); err != nil {
			return err
		}
		reply.Pins = append(reply.Pins, page.Pins...)
		if reply.Next = page.Next; reply.Next == 0 {
			break
		}
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	t := newTable("TENANT", "KEY", "CLASS", "OWNER", "-SESSION", "-ENDS")
	for i := range reply.Pins {
		x := &reply.Pins[i]
		owner, session, ends := printable(x.Owner), "-", "never"
		if x.Session != 0 {
			owner, session, ends = "-", strconv.FormatUint(x.Session, 10), "with session"
		}
		if x.LeftMS >= 0 {
			ends = millis(x.LeftMS)
		}
		t.row(printable(x.Tenant), keyText(x.Key, x.KeyHex, p.Hex), x.Class, owner, session, ends)
	}
	if err := t.print(c.stdout); err != nil {
		return err
	}
	if reply.Next != 0 {
		fmt.Fprintf(c.stdout, "more: --cursor %d\n", reply.Next)
	}
	return nil
}

// keyText shows a key of a reply. Its hexadecimal form tells what its text may not.
func keyText(text, hexadecimal string, asHex bool) string {
	if asHex {
		return hexadecimal
	}
	if b, err := hex.DecodeString(hexadecimal); err == nil && len(b) > 0 {
		text = string(b)
	}
	return printable(text)
}

// printable quotes a key that a terminal should not get as it is.
func printable(key string) string {
	quoted := strconv.Quote(key)
	if quoted == `"`+key+`"` && !strings.Contains(key, " ") {
		return key
	}
	return quoted
}
