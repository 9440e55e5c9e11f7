package meta

import (
	"encoding/binary"

	"larder/protocol"
)

// Kind is the kind of a command. Numbers are for ever: they are in logs.
type Kind uint8

// Commands.
const (
	KindOpenSession  Kind = 1  // open a session
	KindCloseSession Kind = 2  // end one: said goodbye, expired, or its process is dead
	KindFence        Kind = 3  // an ended session's process is proven dead
	KindAlloc        Kind = 4  // REQUEST_ALLOC, as the leader planned it
	KindReturn       Kind = 5  // RETURN_ALLOC
	KindRegister     Kind = 6  // REGISTER and BATCH_REGISTER
	KindDelete       Kind = 7  // DELETE and BATCH_DELETE
	KindPin          Kind = 8  // PIN
	KindUnpin        Kind = 9  // UNPIN
	KindCancel       Kind = 10 // CANCEL
	KindClear        Kind = 11 // CLEAR
	KindSweep        Kind = 12 // remove dead entries, a bounded number of slots at a time
	KindMark         Kind = 13 // take a region from a live owner: its entries go, its owner is asked
	KindRevokeDone   Kind = 14 // the owner's acknowledgement
	KindFreeRegion   Kind = 15 // a drained region's extent is free again
	KindAddDevice    Kind = 16 // a device joins
	KindRetire       Kind = 17 // a device has a new generation: what lay there is lost
	KindDropDevice   Kind = 18 // a device without regions leaves
	KindSettings     Kind = 19 // replicated settings
	KindIncarnation  Kind = 20 // metadata may have gone back in time
	KindEmptyRegion  Kind = 21 // remove a bounded number of a departed region's entries
	KindExpirePins   Kind = 22 // undo the pins whose time is over
	KindTenant       Kind = 23 // a tenant's limits
	KindDevice       Kind = 24 // how a device is used
	KindTask         Kind = 25 // have a device's home copy entries
	KindTaskDone     Kind = 26 // how far it has come
	KindCancelTask   Kind = 27 // it need not any more
	KindFencedRegion Kind = 28 // a device's home has made sure that a region's owner writes there no more
	KindPutName      Kind = 29 // set a name
	KindDeleteName   Kind = 30 // remove one
	KindMaru         Kind = 31 // an operation of a client of Maru's
)

// Header precedes every command. A command with Session and Seq is applied once: its result is remembered until
// Acked passes Seq.
type Header struct {
	Kind    Kind
	Session SessionID // 0 = the leader itself, or a client that gave no seq
	Seq     uint64    // 0 = not protected against repetition
	Acked   uint64    // lowest unanswered seq of the session
}

// Command is one of the command types below.
type Command interface {
	Kind() Kind
	appendTo(b []byte) []byte
	decode(d *decoder)
}

// groupFormat is the first byte of a group, raised when the layout changes.
const groupFormat = 1

// Touch is uses of an entry since the last logged touch of it.
type Touch struct {
	Slot  Slot
	Count uint32
}

// BeginGroup starts a log entry: the log time, and the recency that the leader has collected, which is applied
// before the commands.
func BeginGroup(b []byte, nowMS uint64, touches []Touch) []byte {
	b = append(b, groupFormat)
	b = binary.AppendUvarint(b, nowMS)
	b = binary.AppendUvarint(b, uint64(len(touches)))
	for _, t := range touches {
		b = binary.AppendUvarint(b, uint64(t.Slot))
		b = binary.AppendUvarint(b, uint64(t.Count))
	}
	return b
}

// AppendCommand adds a command to a group.
func AppendCommand(b []byte, h Header, c Command) []byte {
	b = append(b, byte(c.Kind()))
	b = binary.AppendUvarint(b, uint64(h.Session))
	b = binary.AppendUvarint(b, h.Seq)
	b = binary.AppendUvarint(b, h.Acked)
	// The length goes in front as four bytes, patched afterwards, so that the body is encoded once, in place.
	mark := len(b)
	b = append(b, 0, 0, 0, 0)
	b = c.appendTo(b)
	binary.LittleEndian.PutUint32(b[mark:], uint32(len(b)-mark-4)) //nolint:gosec // a group is at most protocol.MaxPayload
	return b
}

// next reads a command's header and body.
func (d *decoder) next() (Header, []byte) {
	h := Header{Kind: Kind(d.byte()), Session: SessionID(d.uvarint()), Seq: d.uvarint(), Acked: d.uvarint()}
	if len(d.b) < 4 {
		d.fail()
		return h, nil
	}
	n := int(binary.LittleEndian.Uint32(d.b))
	if n > len(d.b)-4 {
		d.fail()
		return h, nil
	}
	body := d.b[4 : 4+n : 4+n]
	d.b = d.b[4+n:]
	return h, body
}

// OpenSession opens a session for an instance. If Replaces names an ended or open session of the same instance whose
// client has suspended itself, that one is closed and fenced.
type OpenSession struct {
	Instance string
	Tenant   string
	TTLMS    uint64 // 0 = the session never expires (Maru's clients)
	Features uint64
	Secret   uint64 // drawn by the leader
	Replaces SessionID
	Proof    uint64 // the secret of Replaces, without which that is ignored
	Process  Process
}

// CloseSession ends a session. Fenced says that nothing of it writes any more; Goodbye that the client said so, and
// so returned its regions.
type CloseSession struct {
	ID     SessionID
	Fenced bool
}

// Fence says that nothing of an ended session writes any more.
type Fence struct{ ID SessionID }

// Alloc is a planned REQUEST_ALLOC. One of Size, Victims, Region says what the plan is.
type Alloc struct {
	Device   DeviceID // for Size: where
	Size     uint64   // take a free extent of this many bytes on Device
	PageSize uint64
	Region   RegionID // give this region: own (emptied whole), departed, or taken
	Victims  []Victim // evict these own entries
	Phase    uint8    // 0..3, see protocol.AllocReply
	Touched  []Slot   // entries that the request's keys found, in order: counted as used before anything is evicted
	Found    []byte   // bitmap over the request's keys, returned as it is
	Keys     uint32   // number of the request's keys
	MaxOwned uint64   // refuse if the instance would own more regions than this; 0 = no limit
}

// Victim is an exact entry.
type Victim struct {
	Slot  Slot
	Birth uint64
}

// ReturnRegion is RETURN_ALLOC. With an epoch it is of no other than the region was then (0 = of any, and before
// VersionTenants): one that its owner has meanwhile been given anew stays.
type ReturnRegion struct {
	Region RegionID
	Epoch  uint64
}

// Register is REGISTER and BATCH_REGISTER.
type Register struct {
	Context *protocol.Context
	Entries []protocol.RegisterEntry
}

// Delete is DELETE and BATCH_DELETE. With Region the bytes at Offset of it have turned out not to be what was stored: the
// keys lose the location that has them, and with their last one they go.
type Delete struct {
	Keys   [][]byte
	Region RegionID // 0 = all locations
	Offset uint64
}

// Pin is PIN (and UNPIN, by its kind) of some keys.
type Pin struct {
	Undo   bool
	Class  Class  // ClassHard or ClassSoft
	Owner  string // of a durable pin; "" = the session's own
	Until  uint64 // log time in ms at which it ends; 0 = never
	Strict bool   // Maru's BATCH_PIN: stop at the first missing key
	Keys   [][]byte
}

// Cancel is CANCEL.
type Cancel struct{ Seqs []uint64 }

// Clear is CLEAR.
type Clear struct {
	All     bool
	Prefix  []byte
	Context *Context // empty fields match everything
}

// Sweep looks at the next Limit slots and removes those entries that a CLEAR, a retirement or time has killed.
type Sweep struct{ Limit uint32 }

// Mark takes a region from its live owner on behalf of a session (0 = of nobody: an operator, or a retired device).
type Mark struct {
	Region RegionID
	For    SessionID
}

// RevokeDone acknowledges Mark.
type RevokeDone struct {
	Region RegionID
	Epoch  uint64
}

// FreeRegion gives a draining region's extent back.
type FreeRegion struct{ Region RegionID }

// EmptyRegion removes up to MaxChorePerCommand entries of a departed region, on behalf of a session (0 = of nobody, and
// before VersionTenants) that is given it afterwards.
type EmptyRegion struct {
	Region RegionID
	For    SessionID
}

// AddDevice adds a device, which nobody else can write to: it is new, or was replaced by another inode.
type AddDevice struct {
	UUID       string // 32 hexadecimal digits
	Path       string
	Node       string // the host it is attached to
	Tier       string
	Coherence  string
	Size       uint64
	DataOffset uint64 // bytes reserved for the header
	Align      uint64 // of extents; at least MinPageSize
	Volatile   bool
	BootID     string // of the host, for volatile media
	Generation uint64
	Home       string // instance of the session that serves it; "" = the masters do (all before VersionTiers)
	NUMA       uint64 // the NUMA node that it is close to, plus 1; 0 = not known
}

// SetDevice changes how a device is used: with Mark whether it is given up, otherwise whether it is served. Who changes one
// need not know the other, which may change at the same time.
type SetDevice struct {
	Device   DeviceID
	Mode     DeviceMode
	UntilMS  uint64 // with DeviceAway: the log time from which on its bytes are given up; 0 = never
	Mark     bool
	Draining bool // no new regions are given there, and what lies there is moved away
}

// FencedRegion says that nobody can write to a region of an epoch any more, whatever its owner does.
type FencedRegion struct {
	Region RegionID
	Epoch  uint64
}

// Retire gives a device a new generation: nothing that lay there is served any more. One that a new incarnation took
// out of service, which has generation 0, needs it Fenced.
type Retire struct {
	Device     DeviceID
	Generation uint64
	BootID     string
	Size       uint64 // the device's size now; 0 = unchanged
	Path       string // where it is now; "" = unchanged
	Fenced     bool   // nobody can write to the new bytes who could to the old (another boot, another inode)
}

// DropDevice removes a device that has no regions.
type DropDevice struct{ Device DeviceID }

// SetSettings replaces the settings.
type SetSettings struct{ Settings Settings }

// NewIncarnation follows a restored snapshot, a forced recovery or a rolled-back disk. It is at most MaxIncarnation, and
// in milliseconds since 1970 if there may be other histories of the same pool.
type NewIncarnation struct{ Incarnation uint64 }

// ExpirePins undoes durable and soft pins whose time is over, at most MaxDropPerCommand.
type ExpirePins struct{}

// SetTenant replaces a tenant's limits. A tenant that is not there yet is made, unless nothing is to be set.
type SetTenant struct {
	Tenant string
	Limits TenantLimits
}

// Kind implements Command.
func (*OpenSession) Kind() Kind  { return KindOpenSession }
func (*CloseSession) Kind() Kind { return KindCloseSession } //nolint:revive // see Command
func (*Fence) Kind() Kind        { return KindFence }        //nolint:revive // see Command
func (*Alloc) Kind() Kind        { return KindAlloc }        //nolint:revive // see Command
func (*ReturnRegion) Kind() Kind { return KindReturn }       //nolint:revive // see Command
func (*Register) Kind() Kind     { return KindRegister }     //nolint:revive // see Command
func (*Delete) Kind() Kind       { return KindDelete }       //nolint:revive // see Command
// Kind implements Command.
func (c *Pin) Kind() Kind {
	if c.Undo {
		return KindUnpin
	}
	return KindPin
}
func (*Cancel) Kind() Kind         { return KindCancel }      //nolint:revive // see Command
func (*Clear) Kind() Kind          { return KindClear }       //nolint:revive // see Command
func (*Sweep) Kind() Kind          { return KindSweep }       //nolint:revive // see Command
func (*Mark) Kind() Kind           { return KindMark }        //nolint:revive // see Command
func (*RevokeDone) Kind() Kind     { return KindRevokeDone }  //nolint:revive // see Command
func (*FreeRegion) Kind() Kind     { return KindFreeRegion }  //nolint:revive // see Command
func (*EmptyRegion) Kind() Kind    { return KindEmptyRegion } //nolint:revive // see Command
func (*AddDevice) Kind() Kind      { return KindAddDevice }   //nolint:revive // see Command
func (*Retire) Kind() Kind         { return KindRetire }      //nolint:revive // see Command
func (*DropDevice) Kind() Kind     { return KindDropDevice }  //nolint:revive // see Command
func (*SetSettings) Kind() Kind    { return KindSettings }    //nolint:revive // see Command
func (*NewIncarnation) Kind() Kind { return KindIncarnation } //nolint:revive // see Command
func (*ExpirePins) Kind() Kind     { return KindExpirePins }  //nolint:revive // see Command
func (*SetTenant) Kind() Kind      { return KindTenant }      //nolint:revive // see Command

func (*SetDevice) Kind() Kind    { return KindDevice }       //nolint:revive // see Command
func (*AddTask) Kind() Kind      { return KindTask }         //nolint:revive // see Command
func (*TaskDone) Kind() Kind     { return KindTaskDone }     //nolint:revive // see Command
func (*CancelTask) Kind() Kind   { return KindCancelTask }   //nolint:revive // see Command
func (*FencedRegion) Kind() Kind { return KindFencedRegion } //nolint:revive // see Command

func (c *OpenSession) appendTo(b []byte) []byte {
	b = appendBytes(b, c.Instance)
	b = appendBytes(b, c.Tenant)
	b = binary.AppendUvarint(b, c.TTLMS)
	b = binary.AppendUvarint(b, c.Features)
	b = appendU64(b, c.Secret)
	b = appendU64(binary.AppendUvarint(b, uint64(c.Replaces)), c.Proof)
	return c.Process.appendTo(b)
}

func (c *OpenSession) decode(d *decoder) {
	c.Instance, c.Tenant = d.string(), d.string()
	c.TTLMS, c.Features, c.Secret = d.uvarint(), d.uvarint(), d.u64()
	c.Replaces, c.Proof = SessionID(d.uvarint()), d.u64()
	c.Process.decode(d)
}

func (p *Process) appendTo(b []byte) []byte {
	b = appendBytes(b, p.BootID)
	b = binary.AppendUvarint(b, p.PIDNamespace)
	b = binary.AppendUvarint(b, p.PID)
	return binary.AppendUvarint(b, p.Start)
}

func (p *Process) decode(d *decoder) {
	p.BootID, p.PIDNamespace, p.PID, p.Start = d.string(), d.uvarint(), d.uvarint(), d.uvarint()
}

func (c *CloseSession) appendTo(b []byte) []byte {
	return appendBool(binary.AppendUvarint(b, uint64(c.ID)), c.Fenced)
}

func (c *CloseSession) decode(d *decoder) { c.ID, c.Fenced = SessionID(d.uvarint()), d.bool() }

func (c *Fence) appendTo(b []byte) []byte { return binary.AppendUvarint(b, uint64(c.ID)) }
func (c *Fence) decode(d *decoder)        { c.ID = SessionID(d.uvarint()) }

func (c *Alloc) appendTo(b []byte) []byte {
	b = append(b, c.Phase)
	b = binary.AppendUvarint(b, uint64(c.Device))
	b = binary.AppendUvarint(b, c.Size)
	b = binary.AppendUvarint(b, c.PageSize)
	b = binary.AppendUvarint(b, uint64(c.Region))
	b = binary.AppendUvarint(b, c.MaxOwned)
	b = appendVictims(b, c.Victims)
	b = binary.AppendUvarint(b, uint64(len(c.Touched)))
	for _, s := range c.Touched {
		b = binary.AppendUvarint(b, uint64(s))
	}
	b = binary.AppendUvarint(b, uint64(c.Keys))
	return appendBytes(b, c.Found)
}

func (c *Alloc) decode(d *decoder) {
	c.Phase = d.byte()
	c.Device, c.Size, c.PageSize = DeviceID(d.u32()), d.uvarint(), d.uvarint()
	c.Region, c.MaxOwned = RegionID(d.uvarint()), d.uvarint()
	c.Victims = decodeVictims(d)
	c.Touched = make([]Slot, d.count(1))
	for i := range c.Touched {
		c.Touched[i] = d.u32()
	}
	c.Keys, c.Found = d.u32(), d.bytes()
}

// appendTo leaves the epoch out where there is none: binaries that know no VersionTenants must be able to read it.
func (c *ReturnRegion) appendTo(b []byte) []byte { return appendPair(b, uint64(c.Region), c.Epoch) }

func (c *ReturnRegion) decode(d *decoder) {
	c.Region = RegionID(d.uvarint())
	c.Epoch = d.optional()
}

// Flags of an encoded RegisterEntry: which optional fields follow.
const (
	regEpoch = 1 << iota
	regChecksum
	regTTL
	regPrefix
	regGroup
	regTouch
	regCopy
	regReplicas
)

func (c *Register) appendTo(b []byte) []byte {
	b = appendBool(b, c.Context != nil)
	if x := c.Context; x != nil {
		b = appendBytes(appendBytes(appendBytes(b, x.Model), x.LoRA), x.Salt)
		b = appendU64(binary.AppendUvarint(b, x.BlockSize), x.Seed)
	}
	b = binary.AppendUvarint(b, uint64(len(c.Entries)))
	for i := range c.Entries {
		b = appendEntry(b, &c.Entries[i])
	}
	return b
}

func appendEntry(b []byte, e *protocol.RegisterEntry) []byte {
	flags := byte(0)
	set := func(on bool, bit byte) {
		if on {
			flags |= bit
		}
	}
	set(e.Epoch != 0, regEpoch)
	set(e.Checksum != 0, regChecksum)
	set(e.TTLMS != 0, regTTL)
	set(e.HasPrefix, regPrefix)
	set(e.Group != 0, regGroup)
	set(e.Touch, regTouch)
	set(e.Copy, regCopy)
	set(e.Replicas != 0, regReplicas)
	b = append(b, flags)
	b = appendBytes(b, e.Key)
	b = binary.AppendUvarint(b, e.RegionID)
	b = binary.AppendUvarint(b, e.KVOffset)
	b = binary.AppendUvarint(b, e.KVLength)
	if flags&regEpoch != 0 {
		b = binary.AppendUvarint(b, e.Epoch)
	}
	if flags&regChecksum != 0 {
		b = appendU64(b, e.Checksum)
	}
	if flags&regTTL != 0 {
		b = binary.AppendUvarint(b, e.TTLMS)
	}
	if flags&regPrefix != 0 {
		b = binary.AppendUvarint(appendU64(appendU64(b, e.Hash), e.Parent), e.Index)
	}
	if flags&regGroup != 0 {
		b = binary.AppendUvarint(b, e.Group)
	}
	if e.Copy {
		for _, v := range [...]uint64{e.Of, e.Slot, e.MoveFrom} {
			b = binary.AppendUvarint(b, v)
		}
	}
	if e.Replicas != 0 {
		b = binary.AppendUvarint(b, e.Replicas)
	}
	return b
}

func decodeEntry(d *decoder, e *protocol.RegisterEntry) {
	flags := d.byte()
	*e = protocol.RegisterEntry{Key: d.bytes(), RegionID: d.uvarint(), KVOffset: d.uvarint(), KVLength: d.uvarint()}
	if flags&regEpoch != 0 {
		e.Epoch = d.uvarint()
	}
	if flags&regChecksum != 0 {
		e.Checksum = d.u64()
	}
	if flags&regTTL != 0 {
		e.TTLMS = d.uvarint()
	}
	if flags&regPrefix != 0 {
		e.HasPrefix, e.Hash, e.Parent, e.Index = true, d.u64(), d.u64(), d.uvarint()
	}
	if flags&regGroup != 0 {
		e.Group = d.uvarint()
	}
	e.Touch = flags&regTouch != 0
	if flags&regCopy != 0 {
		e.Copy, e.Of, e.Slot, e.MoveFrom = true, d.uvarint(), d.uvarint(), d.uvarint()
	}
	if flags&regReplicas != 0 {
		e.Replicas = d.uvarint()
	}
}

// decode reads a whole Register; Apply reads entry by entry instead (see register.go).
func (c *Register) decode(d *decoder) {
	c.Context = decodeContext(d)
	c.Entries = make([]protocol.RegisterEntry, d.count(5))
	for i := range c.Entries {
		decodeEntry(d, &c.Entries[i])
	}
}

func decodeContext(d *decoder) *protocol.Context {
	if !d.bool() {
		return nil
	}
	return &protocol.Context{Model: d.string(), LoRA: d.string(), Salt: d.string(), BlockSize: d.uvarint(), Seed: d.u64()}
}

func appendKeys(b []byte, keys [][]byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(keys)))
	for _, k := range keys {
		b = appendBytes(b, k)
	}
	return b
}

func (d *decoder) keys() [][]byte {
	keys := make([][]byte, d.count(1))
	for i := range keys {
		keys[i] = d.bytes()
	}
	return keys
}

func (c *Delete) appendTo(b []byte) []byte {
	b = appendKeys(b, c.Keys)
	if c.Region != 0 {
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(c.Region)), c.Offset)
	}
	return b
}

func (c *Delete) decode(d *decoder) {
	c.Keys = d.keys()
	if d.err == nil && len(d.b) > 0 {
		c.Region, c.Offset = RegionID(d.uvarint()), d.uvarint()
		if c.Region == 0 {
			d.fail()
		}
	}
}

func (c *Pin) appendTo(b []byte) []byte {
	b = appendBool(appendBool(b, c.Undo), c.Strict)
	b = append(b, byte(c.Class))
	b = binary.AppendUvarint(appendBytes(b, c.Owner), c.Until)
	return appendKeys(b, c.Keys)
}

func (c *Pin) decode(d *decoder) {
	c.Undo, c.Strict, c.Class = d.bool(), d.bool(), Class(d.byte())
	c.Owner, c.Until = d.string(), d.uvarint()
	c.Keys = d.keys()
	if c.Class > ClassHard {
		d.fail()
	}
}

func (c *Cancel) appendTo(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(c.Seqs)))
	for _, s := range c.Seqs {
		b = binary.AppendUvarint(b, s)
	}
	return b
}

func (c *Cancel) decode(d *decoder) {
	c.Seqs = make([]uint64, d.count(1))
	for i := range c.Seqs {
		c.Seqs[i] = d.uvarint()
	}
}

func (c *Clear) appendTo(b []byte) []byte {
	b = appendBytes(appendBool(b, c.All), c.Prefix)
	b = appendBool(b, c.Context != nil)
	if c.Context != nil {
		b = c.Context.appendTo(b)
	}
	return b
}

func (c *Clear) decode(d *decoder) {
	c.All, c.Prefix = d.bool(), d.bytes()
	if d.bool() {
		c.Context = &Context{}
		c.Context.decode(d)
	}
}

func (c *Context) appendTo(b []byte) []byte {
	b = appendBytes(appendBytes(appendBytes(appendBytes(b, c.Tenant), c.Model), c.LoRA), c.Salt)
	return appendU64(binary.AppendUvarint(b, c.BlockSize), c.Seed)
}

func (c *Context) decode(d *decoder) {
	c.Tenant, c.Model, c.LoRA, c.Salt = d.string(), d.string(), d.string(), d.string()
	c.BlockSize, c.Seed = d.uvarint(), d.u64()
}

func (c *Sweep) appendTo(b []byte) []byte { return binary.AppendUvarint(b, uint64(c.Limit)) }
func (c *Sweep) decode(d *decoder)        { c.Limit = uint32(min(d.uvarint(), 1<<20)) }

func (c *Mark) appendTo(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(c.Region)), uint64(c.For))
}

func (c *Mark) decode(d *decoder) { c.Region, c.For = RegionID(d.uvarint()), SessionID(d.uvarint()) }

func (c *RevokeDone) appendTo(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(c.Region)), c.Epoch)
}
func (c *RevokeDone) decode(d *decoder) { c.Region, c.Epoch = RegionID(d.uvarint()), d.uvarint() }

func (c *FreeRegion) appendTo(b []byte) []byte { return binary.AppendUvarint(b, uint64(c.Region)) }
func (c *FreeRegion) decode(d *decoder)        { c.Region = RegionID(d.uvarint()) }

// appendTo leaves For out where there is none: binaries that know no VersionTenants must be able to read the command.
func (c *EmptyRegion) appendTo(b []byte) []byte {
	return appendPair(b, uint64(c.Region), uint64(c.For))
}

func (c *EmptyRegion) decode(d *decoder) {
	c.Region = RegionID(d.uvarint())
	c.For = SessionID(d.optional())
}

// appendPair appends a number, and another one unless it is 0; see decoder.optional.
func appendPair(b []byte, first, second uint64) []byte {
	b = binary.AppendUvarint(b, first)
	if second != 0 {
		b = binary.AppendUvarint(b, second)
	}
	return b
}

// optional reads the last number of a command, 0 if it was left out.
func (d *decoder) optional() uint64 {
	if len(d.b) == 0 {
		return 0
	}
	return d.uvarint()
}

func (c *AddDevice) appendTo(b []byte) []byte {
	for _, s := range []string{c.UUID, c.Path, c.Node, c.Tier, c.Coherence, c.BootID} {
		b = appendBytes(b, s)
	}
	b = binary.AppendUvarint(b, c.Size)
	b = binary.AppendUvarint(b, c.DataOffset)
	b = binary.AppendUvarint(b, c.Align)
	b = appendU64(appendBool(b, c.Volatile), c.Generation)
	if c.Home != "" || c.NUMA != 0 { // binaries that know no VersionTiers must be able to read the others
		b = c.appendHome(b)
	}
	return b
}

func (c *AddDevice) appendHome(b []byte) []byte {
	return binary.AppendUvarint(appendBytes(b, c.Home), c.NUMA)
}

func (c *AddDevice) decode(d *decoder) {
	for _, s := range []*string{&c.UUID, &c.Path, &c.Node, &c.Tier, &c.Coherence, &c.BootID} {
		*s = d.string()
	}
	c.Size, c.DataOffset, c.Align = d.uvarint(), d.uvarint(), d.uvarint()
	c.Volatile, c.Generation = d.bool(), d.u64()
	if d.err == nil && len(d.b) > 0 {
		c.Home, c.NUMA = d.string(), d.uvarint()
	}
}

func (c *SetDevice) appendTo(b []byte) []byte {
	b = append(binary.AppendUvarint(b, uint64(c.Device)), byte(c.Mode))
	return appendBool(appendBool(binary.AppendUvarint(b, c.UntilMS), c.Mark), c.Draining)
}

func (c *SetDevice) decode(d *decoder) {
	c.Device, c.Mode, c.UntilMS = DeviceID(d.u32()), DeviceMode(d.byte()), d.uvarint()
	c.Mark, c.Draining = d.bool(), d.bool()
}

func (c *FencedRegion) appendTo(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(c.Region)), c.Epoch)
}

func (c *FencedRegion) decode(d *decoder) { c.Region, c.Epoch = RegionID(d.uvarint()), d.uvarint() }

func (c *Retire) appendTo(b []byte) []byte {
	b = appendU64(binary.AppendUvarint(b, uint64(c.Device)), c.Generation)
	b = appendBytes(appendBytes(b, c.BootID), c.Path)
	return appendBool(binary.AppendUvarint(b, c.Size), c.Fenced)
}

func (c *Retire) decode(d *decoder) {
	c.Device, c.Generation = DeviceID(d.u32()), d.u64()
	c.BootID, c.Path, c.Size, c.Fenced = d.string(), d.string(), d.uvarint(), d.bool()
}

func (c *DropDevice) appendTo(b []byte) []byte { return binary.AppendUvarint(b, uint64(c.Device)) }
func (c *DropDevice) decode(d *decoder)        { c.Device = DeviceID(d.u32()) }

func (c *SetSettings) appendTo(b []byte) []byte { return c.Settings.appendTo(b) }
func (c *SetSettings) decode(d *decoder)        { c.Settings.decode(d) }

func (s *Settings) appendTo(b []byte) []byte {
	b = appendBytes(binary.AppendUvarint(b, uint64(s.Version)), s.Policy)
	for _, v := range []uint64{s.TTLMS, s.PageSize, s.RegionSize, s.MaxRegionsPerInstance, s.MinRegionAgeMS} {
		b = binary.AppendUvarint(b, v)
	}
	if s.Version >= VersionTiers {
		b = binary.AppendUvarint(binary.AppendUvarint(b, s.TierLow), s.PromoteAfter)
	}
	if s.Version >= VersionPromotion {
		b = appendBytes(binary.AppendUvarint(binary.AppendUvarint(b, s.PromoteMost), s.PromoteRate), s.TierLows)
	}
	return b
}

func (s *Settings) decode(d *decoder) {
	s.Version, s.Policy = d.u32(), d.string()
	for _, v := range []*uint64{&s.TTLMS, &s.PageSize, &s.RegionSize, &s.MaxRegionsPerInstance, &s.MinRegionAgeMS} {
		*v = d.uvarint()
	}
	s.TierLow, s.PromoteAfter = defaultTierLow, defaultPromoteAfter
	if s.Version >= VersionTiers {
		s.TierLow, s.PromoteAfter = d.uvarint(), d.uvarint()
	}
	s.PromoteMost, s.PromoteRate, s.TierLows = defaultPromoteMost, defaultPromoteRate, ""
	if s.Version >= VersionPromotion {
		s.PromoteMost, s.PromoteRate, s.TierLows = d.uvarint(), d.uvarint(), d.string()
	}
}

func (c *NewIncarnation) appendTo(b []byte) []byte { return appendU64(b, c.Incarnation) }
func (c *NewIncarnation) decode(d *decoder)        { c.Incarnation = d.u64() }

func (*ExpirePins) appendTo(b []byte) []byte { return b }
func (*ExpirePins) decode(*decoder)          {}

func (c *SetTenant) appendTo(b []byte) []byte { return c.Limits.appendTo(appendBytes(b, c.Tenant)) }

func (c *SetTenant) decode(d *decoder) {
	c.Tenant = d.string()
	c.Limits.decode(d)
}
