package cmd

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"larder/server"
)

// waitPause is how often a command that waits looks how far things are.
const waitPause = time.Second

// devicesTable shows devices.
func devicesTable(devices []server.DeviceStatus) *table {
	t := newTable("-DEVICE", "TIER", "NODE", "PATH", "MODE", "-SIZE", "-FREE", "-LIVE", "-COPIES", "-ENTRIES", "-REGIONS",
		"-TASKS", "COHERENCE", "GENERATION")
	for i := range devices {
		d := &devices[i]
		t.row(d.ID, d.Tier, d.Node, d.Path, deviceMode(d), bytesText(d.Size), bytesText(d.Free), bytesText(d.LiveBytes),
			bytesText(d.CopyBytes), d.Entries, d.Regions, d.Tasks, d.Coherence, d.Generation)
	}
	return t
}

// deviceMode says in a word or two how a device is used.
func deviceMode(d *server.DeviceStatus) string {
	mode := d.Mode
	switch {
	case d.LostInMS > 0:
		mode += ", lost in " + millis(int64(d.LostInMS)) //nolint:gosec // a duration
	case d.Mode != "away" && !d.Ready:
		mode = "not ready"
	}
	if d.Draining {
		mode += ", draining"
	}
	return mode
}

// heldText says what a device that is given up waits for, "" if it waits for nothing.
func heldText(d *server.DeviceStatus) string {
	h := d.Held
	if h == nil || d.Regions == 0 {
		return ""
	}
	var why []string
	if h.Moving > 0 {
		why = append(why, fmt.Sprintf("%d entries are being copied elsewhere", h.Moving))
	}
	if h.Pinned > 0 {
		why = append(why, fmt.Sprintf("%d entries are pinned, such as %q of tenant %s", h.Pinned, h.PinnedKey, h.Tenant))
	}
	if h.LeasedMS > 0 {
		why = append(why, "readers may read there for "+millis(h.LeasedMS))
	}
	for _, o := range h.Owners {
		switch {
		case o.Ended:
			why = append(why, fmt.Sprintf("%s has ended, but %d of its regions may still be written to", o.Instance, o.Regions))
		default:
			ago := millis(o.AskedMS)
			why = append(why, fmt.Sprintf("%s was asked for %d regions %s ago and has not answered", o.Instance, o.Regions, ago))
		}
	}
	switch {
	case d.Mode == "away":
		why = append(why, "it is away")
	case len(why) == 0 && d.Entries > 0:
		why = append(why, "no other device that a node serves takes what lies there")
	}
	if len(why) == 0 {
		return ""
	}
	return fmt.Sprintf("device %d: %s", d.ID, strings.Join(why, "; "))
}

// heldTexts says what devices wait for, a line each.
func heldTexts(devices []server.DeviceStatus) string {
	var text strings.Builder
	for i := range devices {
		if why := heldText(&devices[i]); why != "" {
			fmt.Fprintln(&text, why)
		}
	}
	return text.String()
}

// printDevices shows devices, and what those that are given up wait for.
func printDevices(w io.Writer, devices []server.DeviceStatus) error {
	if err := devicesTable(devices).print(w); err != nil {
		return err
	}
	_, err := io.WriteString(w, heldTexts(devices))
	return err
}

// ctlDevices is larder ctl devices.
type ctlDevices struct{}

// Run implements the command.
func (*ctlDevices) Run(c *call) error {
	var devices []server.DeviceStatus
	if err := c.admin.getLeader(c.ctx, "/devices", nil, &devices); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, devices)
	}
	return printDevices(c.stdout, devices)
}

// ctlDrain is larder ctl drain.
type ctlDrain struct {
	Client ctlDrainClient `cmd:"" default:"withargs" help:"Take all regions from a client."`
	Device ctlDrainDevice `cmd:"" help:"Give up a device: nothing new is put there, and what lies there is moved away."`
	Node   ctlDrainNode   `cmd:"" help:"Give up all devices of a node."`
}

// drainFlags are those of draining devices.
type drainFlags struct {
	Cancel bool `help:"Call it off: the device is used again, and what is left there stays."`
	Wait   bool `help:"Wait until nothing is left there, and say how far it is."`
}

// ctlDrainDevice is larder ctl drain device.
type ctlDrainDevice struct {
	drainFlags `embed:""`

	ID uint64 `arg:"" help:"The device's number; larder ctl devices lists them."`
}

// Run implements the command.
func (d *ctlDrainDevice) Run(c *call) error {
	return d.drain(c, server.DeviceDrainRequest{Device: d.ID, Cancel: d.Cancel})
}

// ctlDrainNode is larder ctl drain node.
type ctlDrainNode struct {
	drainFlags `embed:""`

	Name string `arg:"" help:"The node's name; larder ctl devices lists them."`
}

// Run implements the command.
func (d *ctlDrainNode) Run(c *call) error {
	return d.drain(c, server.DeviceDrainRequest{Node: d.Name, Cancel: d.Cancel})
}

func (d *drainFlags) drain(c *call, in server.DeviceDrainRequest) error {
	if d.Cancel && d.Wait {
		return usageError(errors.New("drain: --cancel has nothing to wait for"))
	}
	var devices []server.DeviceStatus
	if err := c.admin.post(c.ctx, "/devices/drain", in, &devices); err != nil {
		return err
	}
	if d.Wait {
		var err error
		if devices, err = c.waitDrained(devices); err != nil {
			return err
		}
	}
	if c.JSON {
		return printJSON(c.stdout, devices)
	}
	return printDevices(c.stdout, devices)
}

// waitDrained waits until nothing is left on devices, and says on stderr how far it is whenever that changes.
func (c *call) waitDrained(devices []server.DeviceStatus) ([]server.DeviceStatus, error) {
	ids := map[uint64]bool{}
	for i := range devices {
		ids[devices[i].ID] = true
	}
	for told := ""; ; {
		var all, ours []server.DeviceStatus
		if err := c.admin.getLeader(c.ctx, "/devices", nil, &all); err != nil {
			return nil, err
		}
		left, bytes, regions := uint64(0), uint64(0), 0
		for _, d := range all {
			if ids[d.ID] {
				ours = append(ours, d)
				left, bytes, regions = left+d.Entries, bytes+d.LiveBytes, regions+d.Regions
			}
		}
		if text := fmt.Sprintf("%d entries, %s, in %d regions are left", left, bytesText(bytes), regions); text != told {
			fmt.Fprintln(c.stderr, text)
			told = text
		} else {
			fmt.Fprint(c.stderr, heldTexts(ours)) // nothing has changed: this is why
		}
		if regions == 0 {
			return ours, nil
		}
		if err := c.pause(waitPause); err != nil {
			return nil, fmt.Errorf("%s; it goes on without this command: %w", told, err)
		}
	}
}

// pause waits, unless the command's time is over first.
func (c *call) pause(d time.Duration) error {
	select {
	case <-c.ctx.Done():
		return c.ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// tasksTable shows tasks.
func tasksTable(tasks []server.TaskStatus) *table {
	t := newTable("-TASK", "KIND", "STATE", "-DEVICE", "NODE", "-DONE", "-TOTAL", "-COPIED", "-SKIPPED", "-FAILED", "-BYTES", "-AGE")
	for i := range tasks {
		x := &tasks[i]
		t.row(x.ID, x.Kind, x.State, x.Device, x.Node, x.Done, x.Total, x.Copied, x.Skipped, x.Failed, bytesText(x.Bytes),
			millis(int64(x.AgeMS))) //nolint:gosec // a duration
	}
	return t
}

// ctlTasks is larder ctl tasks.
type ctlTasks struct {
	List   ctlTasksList   `cmd:"" default:"1" help:"List tasks: what is copied between devices, and what was lately."`
	Cancel ctlTasksCancel `cmd:"" help:"End tasks. Demotions and drains are made again for as long as they are called for."`
}

// ctlTasksList is larder ctl tasks list.
type ctlTasksList struct{}

// Run implements the command.
func (*ctlTasksList) Run(c *call) error {
	tasks, err := c.tasks(nil)
	switch {
	case err != nil:
		return err
	case c.JSON:
		return printJSON(c.stdout, tasks)
	}
	return tasksTable(tasks).print(c.stdout)
}

// tasks asks for tasks, all if none are named.
func (c *call) tasks(ids []uint64) ([]server.TaskStatus, error) {
	all := []server.TaskStatus{}
	if err := c.admin.getLeader(c.ctx, "/tasks", url.Values{}, &all); err != nil || len(ids) == 0 {
		return all, err
	}
	named := map[uint64]bool{}
	for _, id := range ids {
		named[id] = true
	}
	some := []server.TaskStatus{}
	for i := range all {
		if named[all[i].ID] {
			some = append(some, all[i])
		}
	}
	return some, nil
}

// ctlTasksCancel is larder ctl tasks cancel.
type ctlTasksCancel struct {
	IDs []uint64 `arg:"" name:"id" help:"The tasks' numbers."`
}

// Run implements the command.
func (t *ctlTasksCancel) Run(c *call) error {
	return c.change("/tasks/cancel", server.CancelRequest{Tasks: t.IDs})
}

// copyFlags are those of copy and move.
type copyFlags struct {
	keyFlags `embed:""`

	Keys []string `arg:"" name:"key" help:"Keys of the entries."`
	To   string   `required:"" placeholder:"PLACE" help:"A tier (cxl, dram, ssd), a device (#3), or the name of a node."`
	Wait bool     `help:"Wait until it is done."`
}

// ctlCopy is larder ctl copy.
type ctlCopy struct {
	copyFlags `embed:""`
}

// Run implements the command.
func (k *ctlCopy) Run(c *call) error { return k.run(c, false) }

// ctlMove is larder ctl move.
type ctlMove struct {
	copyFlags `embed:""`
}

// Run implements the command.
func (k *ctlMove) Run(c *call) error { return k.run(c, true) }

// copyReport is what copy and move tell.
type copyReport struct {
	Missing []string            `json:"missing"` // keys that there are not
	Tasks   []server.TaskStatus `json:"tasks"`
}

func (f *copyFlags) run(c *call, move bool) error {
	to, err := server.ParsePlace(f.To)
	if err != nil {
		return usageError(err)
	}
	in := server.CopyRequest{Place: to, Tenant: f.Tenant, Move: move}
	if in.Keys = f.Keys; f.Hex {
		in.Keys, in.KeysHex = nil, f.Keys
	}
	var reply server.CopyReply
	if err := c.admin.post(c.ctx, "/copy", in, &reply); err != nil {
		return err
	}
	report := copyReport{Missing: []string{}, Tasks: []server.TaskStatus{}}
	for i, found := range reply.Found {
		if !found && i < len(f.Keys) {
			report.Missing = append(report.Missing, f.Keys[i])
		}
	}
	if len(reply.Tasks) > 0 {
		if report.Tasks, err = c.follow(reply.Tasks, f.Wait); err != nil {
			return err
		}
	}
	if err := report.print(c); err != nil {
		return err
	}
	if len(report.Missing) > 0 {
		return fmt.Errorf("not found: %s", printable(strings.Join(report.Missing, ", ")))
	}
	return nil
}

func (r *copyReport) print(c *call) error {
	switch {
	case c.JSON:
		return printJSON(c.stdout, r)
	case len(r.Tasks) == 0:
		fmt.Fprintln(c.stdout, "nothing is to be copied")
		return nil
	}
	return tasksTable(r.Tasks).print(c.stdout)
}

// follow describes tasks; with wait, when they are over. It says on stderr how far they are whenever that changes.
func (c *call) follow(ids []uint64, wait bool) ([]server.TaskStatus, error) {
	for told := ""; ; {
		tasks, err := c.tasks(ids)
		if err != nil || !wait {
			return tasks, err
		}
		done, total, left := uint64(0), uint64(0), 0
		for i := range tasks {
			t := &tasks[i]
			done, total = done+t.Done, total+t.Total
			if t.State == "waiting" || t.State == "running" {
				left++
			}
		}
		if left == 0 {
			return tasks, nil
		}
		if text := strconv.FormatUint(done, 10) + " of " + strconv.FormatUint(total, 10) + " entries are done"; text != told {
			fmt.Fprintln(c.stderr, text)
			told = text
		}
		if err := c.pause(waitPause); err != nil {
			return nil, fmt.Errorf("%s; it goes on without this command: %w", told, err)
		}
	}
}
