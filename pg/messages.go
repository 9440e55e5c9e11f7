package pg

import (
	"errors"
	"slices"

	"larder/pg/p2p"
)

// Sends and receives go by the group's port, which belongs to who has the turn. They are beside the collectives, and do not care
// about views: any two ranks that are alive can talk.

// enqueueMessage gives a send or a receive to the port.
func (g *Group) enqueueMessage(w *Work) error {
	g.turn.Lock()
	defer g.turn.Unlock()
	g.mu.Lock()
	err := g.refusal()
	if err == nil {
		g.waiting++
	}
	g.mu.Unlock()
	if err != nil {
		return err
	}
	g.takeDowns()
	c := &w.call
	if c.p2p == send {
		w.message = g.port.Send(c.Root, c.Tag, c.Src)
	} else {
		w.message = g.port.Recv(c.Root, c.Tag, c.Dst)
	}
	g.messages = append(g.messages, w)
	return nil
}

// moveMessages moves messages, and ends the calls of those that are done.
func (g *Group) moveMessages() {
	if len(g.messages) == 0 {
		return
	}
	g.takeDowns()
	for g.port.Poll() {
	}
	n := len(g.messages)
	var over []*Work
	g.messages = slices.DeleteFunc(g.messages, func(w *Work) bool {
		if w.message.Done() {
			over = append(over, w)
			return true
		}
		return false
	})
	if n == len(g.messages) {
		return
	}
	g.mu.Lock()
	g.waiting -= len(over)
	g.mu.Unlock()
	for _, w := range over {
		m := w.message
		w.finish(Result{From: m.From(), Tag: m.Tag(), Bytes: m.Len()}, g.messageError(w, m.Err()))
	}
}

// messageError is what a send or a receive ends with, in this package's words.
func (g *Group) messageError(w *Work, err error) error {
	var down *p2p.DownError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &down):
		ranks := []int{down.Rank}
		if down.Rank == Any {
			ranks = nil
		}
		return &PeerError{Group: g.cfg.ID, Call: w.call.String(), Ranks: ranks, Err: down.Err}
	case errors.Is(err, p2p.ErrClosed):
		return ErrClosed
	default:
		return err
	}
}
