package simtest

import (
	"bytes"
	"math"

	pb "go.etcd.io/raft/v3/raftpb"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// nemesis breaks things, one after the other, for as long as the first phase lasts. Everything a fault needs is drawn
// before it is known whether it happens, so that leaving one out changes as little as possible of the others.
func (s *sim) nemesis(p *proc) {
	var on []class
	for c := range classes {
		if s.mix.faults.has(c) && strikes[c] != nil {
			on = append(on, c)
		}
	}
	if len(on) == 0 {
		return
	}
	p.sleep(3 * sec)
	if s.faulty(memberTransfer) {
		s.world.spawn(s.handOver)
	}
	for {
		p.sleep(int64(s.rngFaults.ExpFloat64() * float64(s.mix.every)))
		if s.quiet {
			return
		}
		c := on[s.rngFaults.IntN(len(on))]
		if s.rngFaults.IntN(6) == 0 {
			c = on[len(on)-1-s.rngFaults.IntN(min(3, len(on)))]
		}
		x := strike{s: s, member: s.anyMember(), other: s.anyMember(), client: s.anyClient(), span: s.span(), keep: s.rngFaults.IntN(101)}
		if s.rngFaults.IntN(2) == 0 {
			if l := s.leader(); l != nil { // leaders are what matters
				x.member = l
			}
		}
		if do := strikes[c](&x); do != nil && s.fires(c) {
			do()
		}
	}
}

// handOver moves leadership every few seconds: leases of the leader before then still run.
func (s *sim) handOver(p *proc) {
	every := 2*sec + s.rngSteps.Int64N(20*sec)
	for !s.quiet {
		p.sleep(int64(s.rngSteps.ExpFloat64() * float64(every)))
		x := &strike{s: s, other: s.sorted()[s.rngSteps.IntN(len(s.members))]}
		if !x.other.running() && s.rngSteps.IntN(5) > 0 {
			continue // operators look first
		}
		if do := x.transfer(); do != nil && !s.quiet && s.fires(memberTransfer) {
			do()
		}
	}
}

// strike is what one fault may use.
type strike struct {
	s             *sim
	member, other *member
	client        *client
	span          int64
	keep          int
}

func (s *sim) span() int64 {
	return int64(math.Pow(10, 7.5+2.6*s.rngFaults.Float64())) // 30 ms to 13 s
}

func (s *sim) anyMember() *member {
	list := s.sorted()
	return list[s.rngFaults.IntN(len(list))]
}

func (s *sim) anyClient() *client { return s.clients[s.rngFaults.IntN(len(s.clients))] }

// strikes make the faults that happen at a time. Each looks whether it is possible, and returns what to do.
var strikes = [classes]func(x *strike) func(){
	netDelay:       (*strike).delay,
	netClog:        (*strike).clog,
	partOne:        (*strike).cutOne,
	partMajority:   (*strike).cutHalf,
	partOneWay:     (*strike).cutOneWay,
	partBridge:     (*strike).cutBridge,
	partClients:    (*strike).cutClients,
	linkDelay:      (*strike).slowLinks,
	linkBreak:      (*strike).breakLink,
	diskTorn:       (*strike).torn,
	diskRot:        (*strike).rot,
	diskMisread:    (*strike).misread,
	diskIO:         (*strike).brokenDisk,
	diskFull:       (*strike).fullDisk,
	diskSlow:       (*strike).slowDisk,
	powerLoss:      (*strike).power,
	powerAll:       (*strike).powerAll,
	memberPause:    (*strike).pauseMember,
	memberWipe:     (*strike).wipe,
	memberTransfer: (*strike).transfer,
	memberChange:   (*strike).change,
	memberLag:      (*strike).lag,
	clockJump:      (*strike).jump,
	deviceLoss:     (*strike).loseDevice,
	version:        (*strike).version,
	restore:        (*strike).restore,
	clientPause:    (*strike).pauseClient,
	clientCrash:    (*strike).crashClient,
	clientDeaf:     (*strike).deafen,
	clientSilent:   (*strike).silence,
	nodeCrash:      (*strike).crashNode,
	nodePause:      (*strike).pauseNode,
	deviceDrain:    (*strike).drain,
}

func (x *strike) delay() func() {
	l := x.s.net.link(x.member.id, x.other.id)
	back := x.s.net.link(x.other.id, x.member.id)
	slow := x.span / 20
	return func() {
		for _, l := range [...]*peerLink{l, back} {
			l.slow, l.slowTo = slow, x.s.now+x.span
		}
	}
}

func (x *strike) clog() func() {
	l := x.s.net.link(x.member.id, x.other.id)
	return func() { l.clogged = max(l.clogged, x.s.now+x.span) }
}

// cut cuts links for a while.
func (x *strike) cut(links [][2]uint64) func() {
	s := x.s
	if len(links) == 0 {
		return nil
	}
	return func() {
		for _, k := range links {
			s.net.link(k[0], k[1]).cut++
		}
		s.after(x.span, s.world, func() {
			for _, k := range links {
				s.net.link(k[0], k[1]).cut--
			}
		})
	}
}

// between lists the links between two groups of members, both ways. What clients can reach does not change.
func between(a, b []uint64) (links [][2]uint64) {
	for _, i := range a {
		for _, j := range b {
			if i != j {
				links = append(links, [2]uint64{i, j}, [2]uint64{j, i})
			}
		}
	}
	return links
}

func (x *strike) others(of uint64) (ids []uint64) {
	for id := range x.s.memberIDs() {
		if id != of {
			ids = append(ids, id)
		}
	}
	return ids
}

func (x *strike) cutOne() func() { return x.cut(between([]uint64{x.member.id}, x.others(x.member.id))) }

func (x *strike) shuffled() []uint64 {
	ids := x.others(0)
	x.s.rngFaults.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

func (x *strike) cutHalf() func() {
	ids := x.shuffled()
	n := len(ids) / 2
	return x.cut(between(ids[:n], ids[n:]))
}

func (x *strike) cutOneWay() func() {
	var links [][2]uint64
	out := x.s.rngFaults.IntN(2) == 0
	for _, id := range x.others(x.member.id) {
		if out {
			links = append(links, [2]uint64{x.member.id, id})
		} else {
			links = append(links, [2]uint64{id, x.member.id})
		}
	}
	return x.cut(links)
}

func (x *strike) cutBridge() func() {
	ids := x.shuffled()
	n := (len(ids) - 1) / 2
	return x.cut(between(ids[:n], ids[n+1:]))
}

// cutClients splits members and clients in two: who reads from a leader that nobody follows any more, and who stores
// with the next. Half of the time the old leader stands still until there is another.
func (x *strike) cutClients() func() {
	s := x.s
	if l := s.leader(); l != nil {
		x.member = l
	}
	ids := x.others(x.member.id)
	if len(ids) == 0 { // a cluster that has just been restored
		return nil
	}
	s.rngFaults.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	n := s.rngFaults.IntN((len(ids) + 1) / 2)
	few, most := append([]uint64{x.member.id}, ids[:n]...), ids[n:]
	span := 2*sec + x.span/2
	pause := s.rngFaults.Int64N(span)
	still := s.rngFaults.IntN(2) == 0
	links := between(few, most)
	reads := make([]bool, len(s.clients))
	for i := range s.clients {
		beyond := few
		if reads[i] = s.rngFaults.IntN(2) == 0; reads[i] {
			beyond = most
		}
		for _, id := range beyond {
			links = append(links, [2]uint64{clientPlaces + uint64(i), id})
			if i < len(s.marus) {
				at := clientPlaces + maruPlaces + uint64(i)
				links = append(links, [2]uint64{at, id}, [2]uint64{id, at})
			}
		}
	}
	noticed := s.rngFaults.IntN(3) > 0
	x.span = span
	cut := x.cut(links)
	return func() {
		cut()
		s.busyTo = s.now + span + sec
		for i, c := range s.clients {
			if c != nil {
				c.reads = reads[i]
			}
			if c == nil || c.conn == nil || c.conn.server == nil || s.net.open(c.place(), c.conn.to.id) {
				continue
			}
			if noticed {
				c.conn.server.reset(true)
			} else {
				c.conn.up.cut, c.conn.server.down.cut = true, true
			}
		}
		if still && x.member.running() {
			x.member.pause(pause)
		}
	}
}

func (x *strike) slowLinks() func() {
	s := x.s
	return func() {
		s.linkSlow, s.linkSlowTo = x.span/30, s.now+x.span
		for _, c := range s.clients {
			if c != nil && c.conn != nil && c.conn.server != nil {
				c.conn.up.slow, c.conn.server.down.slow = s.linkSlow, s.linkSlow
				conn := c.conn
				s.after(x.span, s.world, func() { conn.up.slow, conn.server.down.slow = 0, 0 })
			}
		}
	}
}

func (x *strike) breakLink() func() {
	c := x.client
	how := x.s.rngFaults.IntN(4)
	if c == nil || c.life.dead || c.conn == nil || c.conn.server == nil {
		return nil
	}
	return func() {
		conn := c.conn
		switch how {
		case 0: // both hear of it
			conn.server.reset(true)
		case 1: // nobody does
			conn.up.cut, conn.server.down.cut = true, true
		case 2: // requests get through, answers do not
			conn.server.down.cut = true
		case 3:
			conn.up.cut = true
		}
	}
}

// spare says that the cluster can do without one more member for good: all others are whole and take part.
func (s *sim) spare(m *member) bool {
	if s.operator.busy() {
		return false
	}
	for _, o := range s.sorted() {
		if o != m && (!o.up() || o.rotten || o.lagging || o.joins && o.at == 0) {
			return false
		}
	}
	return len(s.members) >= 3
}

func (x *strike) torn() func() {
	if !x.member.up() {
		return nil
	}
	return func() { x.member.powerOff(x.keep, true) }
}

// power ends a member at once, or within one of the next operations of its disk.
func (x *strike) power() func() {
	m := x.member
	at, of := x.s.rngFaults.IntN(60), x.s.rngFaults.IntN(2)
	torn := x.s.faulty(diskTorn) && x.s.rngFaults.IntN(2) == 0
	if !m.up() {
		return nil
	}
	return func() {
		if at < 10 {
			m.powerOff(x.keep, torn)
			return
		}
		m.disk.mu.Lock()
		m.disk.crashIn, m.disk.keep, m.disk.torn = [2]int{}, x.keep, torn
		m.disk.crashIn[of] = at - 9
		m.disk.mu.Unlock()
	}
}

func (x *strike) powerAll() func() {
	return func() {
		for _, m := range x.s.sorted() {
			if m.up() {
				m.powerOff(x.keep, false)
			}
		}
	}
}

// rot flips bits on the disk of a member while it is down. If the member finds out, it is replaced.
func (x *strike) rot() func() {
	m := x.member
	flips := 1 + x.s.rngFaults.IntN(3)
	if !m.up() || !x.s.spare(m) {
		return nil
	}
	return func() {
		m.rotten = true
		m.down(100, false)
		for range flips {
			name, at := m.disk.rot()
			x.s.logf("member %d: a bit of %s flips at %d", m.id, name, at)
		}
		x.s.after(x.span/4, x.s.world, m.restart)
	}
}

// misread makes some reads of a member's disk return another block, from its next start on.
func (x *strike) misread() func() {
	m := x.member
	of := 1 + x.s.rngFaults.Uint64N(40)
	if !m.up() || !x.s.spare(m) {
		return nil
	}
	return func() {
		m.powerOff(100, false)
		m.disk.draw() // other places than the last time
		m.disk.misreadOf, m.disk.sick = of, true
	}
}

func (x *strike) brokenDisk() func() {
	m := x.member
	in := 1 + x.s.rngFaults.IntN(30)
	if !m.up() || !x.s.spare(m) {
		return nil
	}
	return func() {
		m.disk.mu.Lock()
		m.disk.failIn, m.disk.sick = in, true
		m.disk.mu.Unlock()
	}
}

func (x *strike) fullDisk() func() {
	m := x.member
	if !m.up() {
		return nil
	}
	return func() {
		m.disk.full(true)
		x.s.after(x.span, x.s.world, func() { m.disk.full(false) })
	}
}

func (x *strike) slowDisk() func() {
	m := x.member
	return func() { m.slow, m.slowTo = min(x.span/50, 100*ms), x.s.now+x.span }
}

func (x *strike) pauseMember() func() {
	if !x.member.running() {
		return nil
	}
	return func() { x.member.pause(x.span) }
}

// wipe makes a member lose its disk. It comes back under a new id.
func (x *strike) wipe() func() {
	m := x.member
	if !m.up() || !x.s.spare(m) {
		return nil
	}
	return func() {
		m.down(0, false)
		x.s.replace(m)
	}
}

func (x *strike) transfer() func() {
	l := x.s.leader()
	if l == nil || x.other == l {
		return nil
	}
	return func() { l.life.spawn(func(p *proc) { l.transfer(p, x.other.id) }) }
}

// transfer hands leadership over, as raft.Node.TransferLeadership: first every deadline that a confirmation gave must
// have passed, and if the other does not take over this member steps down.
func (m *member) transfer(p *proc, to uint64) {
	term := m.core.LeadTerm()
	if term == 0 || m.reads.fenced || to == m.id || !m.hears(to) {
		return
	}
	m.reads.fenced = true
	for left := m.reads.deadline - m.clock.Boottime(); left > 0; left = m.reads.deadline - m.clock.Boottime() {
		p.sleep(max(m.clock.length(left), ms))
	}
	if m.core.LeadTerm() != term {
		return
	}
	if err := m.core.TransferLeadership(to); err != nil {
		m.reads.fenced = false
		return
	}
	m.poke()
	p.waitFor(func() bool { return m.core.LeadTerm() != term }, transferRounds*tick)
	if m.core.LeadTerm() == term {
		m.note(m.core.Step(&pb.Message{
			Type: pb.MsgAppResp.Enum(), From: new(to), To: new(m.id), Term: new(term + 1), Reject: new(true),
		}))
		m.poke()
	}
}

// hears reports whether a voter has been heard of lately.
func (m *member) hears(of uint64) bool {
	for _, x := range m.core.Status().Members {
		if x.ID == of {
			return x.Active && !x.Learner
		}
	}
	return false
}

// change adds a member and removes another, or only moves one.
func (x *strike) change() func() {
	m := x.member
	if !x.s.spare(m) || len(x.s.members) < 3 {
		return nil
	}
	return func() { x.s.operator.swap(m) }
}

// lag keeps a member away until the others have cut their logs.
func (x *strike) lag() func() {
	m := x.member
	if !m.up() || !x.s.spare(m) {
		return nil
	}
	return func() {
		m.lagging = true
		m.down(x.keep, false)
		x.s.after(x.span+2*sec, x.s.world, func() {
			m.lagging = false
			m.restart()
		})
	}
}

// jump moves a clock ahead: a client's, or that of a member that does not lead, since a clock that jumps under a leader
// breaks what CLOCK_BOOTTIME promises.
func (x *strike) jump() func() {
	c, m := x.client, x.member
	of := x.s.rngFaults.IntN(2)
	if of == 0 && c != nil {
		return func() { c.clock.jumped += x.span }
	}
	if !m.up() || m.core.LeadTerm() != 0 || m.master.Serving() {
		return nil
	}
	return func() { m.clock.jumped += x.span }
}

func (x *strike) loseDevice() func() {
	d := x.s.devices[x.s.rngFaults.IntN(len(x.s.devices))]
	if d.lost || d.tier != "" {
		return nil
	}
	return func() {
		x.s.loseMarus(d.mem)
		d.lose()
	}
}

// version raises the cluster's version to what it is, which every release does once all members support it, and tries
// to put it back, which must not work. Then it uses what the version has: another guarantee for the one tenant there is,
// which binds nobody, but must be the same on every member however it got there.
func (x *strike) version() func() {
	l := x.s.leader()
	if l == nil || x.s.log.state.Incarnation() == 0 {
		return nil
	}
	return func() {
		l.life.spawn(func(p *proc) {
			for _, v := range [...]uint32{meta.ClusterVersion, meta.ClusterVersion - 1} {
				set := x.s.log.state.Settings()
				set.Version = v
				_, code := l.do(p, &meta.SetSettings{Settings: set})
				x.s.versionSet(v, code)
			}
			guarantee := uint64(x.s.now) % (8 * pageSize)
			l.do(p, &meta.SetTenant{Tenant: meta.DefaultTenant, Limits: meta.TenantLimits{Guarantee: guarantee}})
		})
	}
}

// versionSet checks the answer to a new version of the cluster: it never goes back.
func (s *sim) versionSet(v uint32, code protocol.Code) {
	if v < meta.ClusterVersion && code == protocol.CodeOK {
		s.fail("version", "the cluster's version was put back to %d", v)
	}
}

func (x *strike) pauseClient() func() {
	c := x.client
	if c == nil || c.life.dead || c.life.paused {
		return nil
	}
	return func() {
		if of := x.s.maruBeside(c); of != nil {
			of.life.paused = true
			x.s.after(x.span, x.s.world, of.life.resume)
		}
		c.life.paused = true
		x.s.after(x.span, x.s.world, c.life.resume)
	}
}

// crashClient ends a client's process. Another takes its name after a while.
func (x *strike) crashClient() func() {
	c := x.client
	if c == nil || c.life.dead {
		return nil
	}
	return func() {
		if of := x.s.maruBeside(c); of != nil {
			x.s.restartMaru(of, x.span/8)
		}
		c.crash()
		x.s.after(x.span/8, x.s.world, func() {
			if x.s.clients[c.n] == c {
				x.s.newClient(c.n)
			}
		})
	}
}

// anyNode draws a node, nil if it is not there at the moment.
func (x *strike) anyNode() *client {
	n := x.s.nodes[x.s.rngFaults.IntN(len(x.s.nodes))]
	if n == nil || n.life.dead {
		return nil
	}
	return n
}

func (x *strike) crashNode() func() {
	n := x.anyNode()
	if n == nil {
		return nil
	}
	return func() {
		n.crash()
		n.node.retire()
		x.s.after(x.span/2, x.s.world, func() { x.s.restartNode(n) })
	}
}

// restartNode starts a node again, unless somebody did.
func (s *sim) restartNode(n *client) {
	i := n.n - nodePlaces
	if s.nodes[i] == n && n.life.dead {
		s.newNode(i)
	}
}

func (x *strike) pauseNode() func() {
	n := x.anyNode()
	if n == nil || n.life.paused {
		return nil
	}
	return func() {
		n.life.paused = true
		x.s.after(x.span, x.s.world, n.life.resume)
	}
}

// drain has a device emptied for a while.
func (x *strike) drain() func() {
	s := x.s
	d := s.devices[s.rngFaults.IntN(len(s.devices))]
	return func() {
		s.operator.drain(d, true)
		s.after(x.span, s.world, func() { s.operator.drain(d, false) })
	}
}

// drain marks a device, or ends that.
func (o *operator) drain(d *device, on bool) {
	s := o.s
	o.add(func(p *proc) {
		for {
			l := s.leader()
			if l == nil {
				p.sleep(200 * ms)
				continue
			}
			for _, i := range s.log.state.Devices() {
				if i.UUID == d.uuid {
					var code protocol.Code
					done := false
					l.life.spawn(func(p *proc) {
						_, code = l.do(p, &meta.SetDevice{Device: i.ID, Mark: true, Draining: on})
						done = true
						o.p.wake()
					})
					if !p.waitFor(func() bool { return done }, 2*sec) || code != protocol.CodeOK {
						i.Draining = !on
					}
					if i.Draining != on && !on {
						p.sleep(200 * ms)
						continue
					}
				}
			}
			return
		}
	})
}

func (x *strike) deafen() func() {
	c := x.client
	if c == nil || c.life.dead {
		return nil
	}
	return func() {
		c.deaf = true
		x.s.after(x.span, x.s.world, func() { c.deaf = false })
	}
}

func (x *strike) silence() func() {
	c := x.client
	if c == nil || c.life.dead {
		return nil
	}
	return func() { c.silentTo = c.clock.Boottime() + x.span }
}

// operator does what people do to a cluster: it replaces members that are gone.
type operator struct {
	s     *sim
	tasks []func(p *proc)
	p     *proc
	at    bool
}

func newOperator(s *sim) *operator {
	o := &operator{s: s}
	o.p = s.world.spawn(o.work)
	return o
}

func (o *operator) busy() bool { return o.at || len(o.tasks) > 0 }

func (o *operator) add(task func(p *proc)) {
	o.tasks = append(o.tasks, task)
	o.p.wake()
}

func (o *operator) work(p *proc) {
	o.p = p
	for {
		p.wait(func() bool { return len(o.tasks) > 0 })
		task := o.tasks[0]
		o.tasks = o.tasks[1:]
		o.at = true
		task(p)
		o.at = false
	}
}

// replace puts a new member in the place of one that is lost.
func (s *sim) replace(m *member) {
	s.cover.Replaced++
	s.retire(m)
	s.operator.add(func(p *proc) {
		s.operator.conf(p, pb.ConfChangeRemoveNode, m.id)
		s.operator.join(p)
	})
}

// retire forgets a member: its process ends for ever.
func (s *sim) retire(m *member) {
	s.trace("retires", m.id, 0)
	s.expelled[m.id] = true
	if m.life != nil {
		m.down(0, false)
	}
	delete(s.members, m.id)
}

// swap adds a member and then removes another.
func (o *operator) swap(m *member) {
	o.add(func(p *proc) {
		o.join(p)
		if o.s.members[m.id] == m && len(o.s.members) > o.s.mix.members {
			o.conf(p, pb.ConfChangeRemoveNode, m.id)
			p.sleep(sec)
			if o.s.members[m.id] == m {
				o.s.retire(m)
			}
		}
	})
}

// join adds a member under a new id, first as a learner, and when it has caught up as a voter.
func (o *operator) join(p *proc) {
	s := o.s
	id := s.nextID
	s.nextID++
	o.conf(p, pb.ConfChangeAddLearnerNode, id)
	m := s.newMember(id)
	m.joins = true
	m.start()
	o.conf(p, pb.ConfChangeAddNode, id)
}

// conf carries a membership change out, however long it takes.
func (o *operator) conf(p *proc, typ pb.ConfChangeType, id uint64) {
	s := o.s
	for {
		l := s.leader()
		if l == nil || !o.may(l, typ, id) {
			p.sleep(200 * ms)
			continue
		}
		if l.id == id { // a leader that is to go hands over first
			for _, other := range s.sorted() {
				if other != l && other.running() {
					l.life.spawn(func(p *proc) { l.transfer(p, other.id) })
					break
				}
			}
			p.sleep(sec)
			continue
		}
		var result error
		done := false
		_, _, err := l.core.ProposeConfChange(typ, memberRecord(id), func(err error) {
			done, result = true, err
			p.wake()
		})
		l.poke()
		if err == nil && p.waitFor(func() bool { return done }, 5*sec) && result == nil {
			s.trace("conf", id, uint64(typ))
			return
		}
		if done {
			err = result
		}
		if o.settled(typ, err) {
			return
		}
		p.sleep(300 * ms)
	}
}

// settled reports whether an error says that there is nothing left to do.
func (o *operator) settled(typ pb.ConfChangeType, err error) bool {
	switch {
	case err == nil:
		return false
	case typ == pb.ConfChangeRemoveNode: // it is of a cluster before a restore
		return bytes.Contains([]byte(err.Error()), []byte(raft.ErrUnknownMember.Error()))
	case typ == pb.ConfChangeAddLearnerNode:
		return bytes.Contains([]byte(err.Error()), []byte(raft.ErrIDReused.Error()))
	default:
		return false
	}
}

// may is what raft.Node looks at before it proposes a change.
func (o *operator) may(l *member, typ pb.ConfChangeType, id uint64) bool {
	st := l.core.Status()
	voters, active := 0, 0
	for _, x := range st.Members {
		if x.ID == id && typ == pb.ConfChangeAddNode && x.Learner && (!x.Active || x.Match+5 < st.Commit) {
			return false
		}
		if x.Learner || x.ID == id {
			continue
		}
		voters++
		if x.Active {
			active++
		}
	}
	return typ != pb.ConfChangeRemoveNode || active > voters/2
}
