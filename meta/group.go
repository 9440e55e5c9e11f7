package meta

import "fmt"

// Group is a decoded log entry, for those who read the log rather than apply it: reference models and tools.
type Group struct {
	NowMS    uint64 // log time as the leader stamped it; Apply never goes back behind an earlier one
	Touches  []Touch
	Commands []GroupCommand
}

// GroupCommand is one command of a group.
type GroupCommand struct {
	Header  Header
	Command Command
}

// DecodeGroup decodes what BeginGroup and AppendCommand wrote. Keys alias data. An empty entry is an empty group. It
// fails with ErrCorrupt, or for a format or command that this binary does not know. Apply is less strict in one thing: it
// does not look into commands that it refuses or has answered before.
func DecodeGroup(data []byte) (Group, error) {
	var g Group
	if len(data) == 0 {
		return g, nil
	}
	d := decoder{b: data}
	if v := d.byte(); v != groupFormat {
		return g, fmt.Errorf("meta: the log entry has format %d, this binary reads %d: run a newer one", v, groupFormat)
	}
	g.NowMS = d.uvarint()
	g.Touches = make([]Touch, d.count(2))
	for i := range g.Touches {
		g.Touches[i] = Touch{Slot: d.u32(), Count: d.u32()}
	}
	for len(d.b) > 0 && d.err == nil {
		h, body := d.next()
		if d.err != nil {
			break
		}
		c := newCommand(h.Kind)
		if c == nil {
			return g, fmt.Errorf("command %d is not known to this binary: run a newer one", h.Kind)
		}
		b := decoder{b: body}
		c.decode(&b)
		if err := b.end(); err != nil {
			return g, err
		}
		g.Commands = append(g.Commands, GroupCommand{h, c})
	}
	return g, d.err
}
