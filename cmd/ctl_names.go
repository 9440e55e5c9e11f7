package cmd

import (
	"encoding/hex"
	"fmt"
	"net/url"
	"strconv"

	"larder/protocol"
	"larder/server"
)

// ctlNames is larder ctl names.
type ctlNames struct {
	Tenant string `help:"Whose names (default: the default tenant)."`
	Prefix string `help:"Only names that begin with this."`
	Hex    bool   `help:"The prefix and --after are given as hexadecimal bytes, and names and values are shown so."`
	Limit  int    `default:"100" help:"Most names to list (default 100)."`
	After  string `help:"Where to go on, as printed by the last call."`
}

// Run implements the command.
func (n *ctlNames) Run(c *call) error {
	given := &keyFlags{Hex: n.Hex}
	prefix, err := given.bytes(n.Prefix)
	if err != nil {
		return err
	}
	after, err := given.bytes(n.After)
	if err != nil {
		return err
	}
	reply := server.NamesReply{Names: []server.NameView{}}
	for len(reply.Names) < n.Limit {
		var page server.NamesReply
		query := url.Values{
			"tenant": {n.Tenant}, "prefix": {string(prefix)}, "after": {string(after)},
			"limit": {strconv.Itoa(min(n.Limit-len(reply.Names), protocol.MaxNames))},
		}
		if err := c.admin.getLeader(c.ctx, "/names", query, &page); err != nil {
			return err
		}
		reply.Names = append(reply.Names, page.Names...)
		if reply.Next = page.Next; reply.Next == "" {
			break
		}
		if after, err = hex.DecodeString(page.Next); err != nil {
			return fmt.Errorf("ctl names: the server's cursor: %w", err)
		}
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	t := newTable("NAME", "VALUE", "-CREATED", "-MODIFIED", "-SESSION", "INSTANCE")
	for i := range reply.Names {
		x := &reply.Names[i]
		t.row(keyText(x.Key, x.KeyHex, n.Hex), clipped(keyText(x.Value, x.ValueHex, n.Hex)), x.Created, x.Modified, x.Session,
			printable(x.Instance))
	}
	if err := t.print(c.stdout); err != nil {
		return err
	}
	if reply.Next != "" {
		fmt.Fprintf(c.stdout, "more: --after %s\n", keyText(string(after), reply.Next, n.Hex))
	}
	return nil
}

// clipped is what of a value fits a table; --json has it all.
func clipped(text string) string {
	const most = 60
	if r := []rune(text); len(r) > most {
		return string(r[:most]) + "..."
	}
	return text
}
