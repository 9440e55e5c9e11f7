package meta

// Block is a prefix block of a context: what KV events tell of. Entries without prefix attributes are none.
type Block struct {
	Context   *Context // it never changes
	Hash      uint64
	Parent    uint64 // the hash of the block before it
	HasParent bool   // it is known
	Index     uint32 // in its prompt
	Group     uint32 // how many members the block has, and in the upper half which of them this is; see PrefixMatch
	Media     Media
}

// Media are what a block lies on.
type Media uint8

// The media: memory of any kind, and the slowest tier.
const (
	InMemory Media = 1 << iota
	OnDisk
)

// BlockChange says that a block lies on media now, or does not any more.
type BlockChange struct {
	Block
	Kind ChangeKind
}

// ChangeKind is what a BlockChange says.
type ChangeKind uint8

// The kinds of changes.
const (
	BlockStored ChangeKind = iota
	BlockRemoved
	BlocksCleared // no block of any tenant lies anywhere; nothing else of the change is set
)

func (r *region) medium() Media {
	if r.slow() {
		return OnDisk
	}
	return InMemory
}

// told is what the block changes of the past have said of an entry: wherever it has a location, also if that is not sound any
// more, unless all was cleared since.
func (m *Machine) told(x *entry) (media Media) {
	if x.birth <= m.head.clearedAll {
		return 0
	}
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		media |= r.medium()
		return true
	})
	return media
}

// held is what an entry lies on and may be served from, now or when its device is back.
func (m *Machine) held(x *entry) (media Media) {
	if !m.kept(x) {
		return 0
	}
	m.locations(x, func(_ placeID, r *region, _ uint64) bool {
		if r.sound() {
			media |= r.medium()
		}
		return true
	})
	return media
}

// block describes an entry that is one, without its media.
func (m *Machine) block(x *entry) Block {
	b := Block{Context: &m.contextOf(x).Context, Hash: x.hash, Index: x.index, Group: x.group}
	if parent := m.validParent(x); parent != None {
		b.Parent, b.HasParent = m.table.at(parent).hash, true
	}
	return b
}

// wasBlock is an entry as it was before a change.
type wasBlock struct {
	Block
	birth      uint64
	ctx        handle
	told, held Media
	is         bool // it is a block, and somebody wants to hear of it
}

// blockBefore takes note of an entry that is about to change. It costs nothing where nobody wants to hear of blocks.
func (m *Machine) blockBefore(x *entry) (w wasBlock) {
	if !m.out.WantBlocks || x.flags&flagPrefix == 0 {
		return w
	}
	return wasBlock{Block: m.block(x), birth: x.birth, ctx: x.ctx, told: m.told(x), held: m.held(x), is: true}
}

// blockAfter tells what has changed of a block, which is held on these media by its entry now: on none if that has gone.
//
// Other entries of the same block count: what the block lies on by one of them is not gone. What was told of one that cannot
// be served any more, and waits for a sweep, is taken back before the block is told anew: who counts copies counts right, and
// who has listed blocks meanwhile, without that one, hears of it.
func (m *Machine) blockAfter(w *wasBlock, held Media) {
	if !w.is {
		return
	}
	others, told := Media(0), w.told
	s, ok := m.prefixes[m.prefixKey(w.ctx, w.Hash)]
	for ok && s != None {
		x := m.table.at(s)
		if x.ctx == w.ctx && x.hash == w.Hash && x.group == w.Group && x.birth != w.birth {
			others |= m.held(x)
			told |= m.told(x)
		}
		s = x.pnext
	}
	fresh := held &^ w.held &^ others
	m.tellBlock(w, BlockRemoved, w.told&^held&^others|told&fresh)
	m.tellBlock(w, BlockStored, fresh)
}

func (m *Machine) tellBlock(w *wasBlock, kind ChangeKind, media Media) {
	if media == 0 {
		return
	}
	b := w.Block
	b.Media = media
	m.out.Blocks = append(m.out.Blocks, BlockChange{b, kind})
}

// blockAdded tells of an entry that is new. Its parent is told as it was given, whether it is held or not.
func (m *Machine) blockAdded(x *entry, parent uint64) {
	w := m.blockBefore(x)
	w.told, w.held = 0, 0
	if x.index > 0 {
		w.Parent, w.HasParent = parent, true
	}
	m.blockAfter(&w, m.held(x))
}

// blocksCleared tells that none are left.
func (m *Machine) blocksCleared() {
	if m.out.WantBlocks && m.table.count > 0 {
		m.out.Blocks = append(m.out.Blocks, BlockChange{Kind: BlocksCleared})
	}
}

// blocksLooked is how many slots one page of ListBlocks looks at, a few milliseconds.
const blocksLooked = 1 << 16

// ListBlocks calls fn with the blocks of a tenant ("" = all) that are held, from cursor on, at most limit, and returns the
// cursor for the next page, 0 at the end. What lies on a device that is away, and is not served at the moment, is among them:
// nothing is told of a device's going away, nor of its coming back. A block may come twice, by two entries. A page may be
// short, or empty, and yet not the last.
func (r *Reading) ListBlocks(tenantName string, cursor uint64, limit int, fn func(b *Block)) uint64 {
	m := r.m
	end := min(uint64(m.table.end), cursor+blocksLooked)
	for ; cursor < end && limit > 0; cursor++ {
		s := Slot(cursor) //nolint:gosec // below table.end
		if !m.table.live(s) {
			continue
		}
		x := m.table.at(s)
		if x.flags&flagPrefix == 0 || tenantName != "" && m.contextOf(x).tenant.name != tenantName || r.over(x) {
			continue
		}
		if media := m.held(x); media != 0 {
			b := m.block(x)
			b.Media = media
			fn(&b)
			limit--
		}
	}
	if cursor >= uint64(m.table.end) {
		return 0
	}
	return cursor
}
