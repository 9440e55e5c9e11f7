package link

import "larder/pg/shm"

// lane is a pair of rings to another process, as this one uses it.
type lane struct {
	rank int
	via  string
	p    *shm.Producer // nil while it is being made
	c    *shm.Consumer
	by   carrier // nil if both processes have the memory of both rings
}

// carrier moves the bytes of a lane whose rings lie in each process's own memory.
type carrier interface {
	// lose: the peer's process is down. What has come of it is still delivered.
	lose(err error)
	// cut ends it at once.
	cut(err error)
	// close has it end by itself, when what was written has been carried or lingerTime is over. The rings of this process's users are
	// closed already.
	close()
}

// lose tells those who use the lane that the peer is down, once they have read what has come.
func (l *lane) lose(err error) {
	l.p.Fail(err)
	if l.by != nil {
		l.by.lose(err)
		return
	}
	l.c.Fail(err)
}

// cut gives the lane up.
func (l *lane) cut(err error) {
	if l.p != nil {
		l.p.Fail(err)
	}
	l.c.Fail(err)
	if l.by != nil {
		l.by.cut(err)
	}
}

// close ends it. Nobody uses it any more.
func (l *lane) close() {
	if l.p != nil {
		_ = l.p.Close() // nothing is lost that could still be had, as in the next
	}
	_ = l.c.Close()
	if l.by != nil {
		l.by.close()
	}
}

// waker is the bell of a goroutine.
type waker chan struct{}

// Ring implements [shm.Ringer].
func (w waker) Ring() { poke(w) }

// poke sends to a channel that holds one element, unless it is there already.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
