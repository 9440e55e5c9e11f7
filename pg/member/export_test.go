package member

// Freeze has a group do nothing any more, as if its process had died.
func (g *Group) Freeze() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.end()
}
