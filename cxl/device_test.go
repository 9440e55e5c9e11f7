package cxl

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestFormatThenOpen(t *testing.T) {
	media(t, func(t *testing.T, path string, kind Kind) {
		t.Helper()
		require.NoError(t, Format(path, testOptions()))
		info, err := Inspect(path)
		require.NoError(t, err)
		require.NoError(t, info.HeaderErr)
		require.Equal(t, kind, info.Kind)
		require.Equal(t, kind.Volatile(), info.Volatile)
		require.EqualValues(t, testSize, info.Size)
		require.False(t, info.Torn)
		require.False(t, info.Lost)
		require.Equal(t, ClaimNone, info.Claim)

		d := open(t, path, Expect{Pool: testPool, Device: testDevice, DeviceID: 3, Claim: true})
		require.EqualValues(t, 41, d.Generation())
		require.False(t, d.Lost())
		require.Equal(t, kind, d.Kind())
		require.Equal(t, path, d.SharePath())
		info, err = Inspect(path)
		require.NoError(t, err)
		require.Equal(t, ClaimAlive, info.Claim)
		require.EqualValues(t, os.Getpid(), info.Header.Claim.PID)

		require.NoError(t, d.Close())
		require.ErrorIs(t, d.Close(), ErrClosed)
		info, err = Inspect(path)
		require.NoError(t, err)
		require.Equal(t, ClaimNone, info.Claim, "a clean close gives the claim up")
	})
}

func TestFormatReservesAllRoom(t *testing.T) {
	media(t, func(t *testing.T, path string, _ Kind) {
		t.Helper()
		require.NoError(t, Format(path, testOptions()))
		var st unix.Stat_t
		require.NoError(t, unix.Stat(path, &st))
		require.EqualValues(t, testSize, st.Size)
		require.GreaterOrEqual(t, st.Blocks*512, int64(testSize))
		require.EqualValues(t, 0o600, st.Mode&0o777)
	})
}

func TestFormatWithoutRoomLeavesNothing(t *testing.T) {
	path := onTmpFS(t)
	opts := testOptions()
	opts.Size = 1 << 50
	var short *SpaceError
	err := Format(path, opts)
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorAs(t, err, &short)
	require.EqualValues(t, 1<<50, short.Need)
	require.Positive(t, short.Have)
	require.NoFileExists(t, path)
}

func TestFormatOnFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	path := filepath.Join(dir, "pool")
	opts := testOptions()
	require.NoError(t, Format(path, opts))
	opts.Size, opts.Force = 32<<20, true
	require.ErrorIs(t, Format(path, opts), ErrNoSpace)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.EqualValues(t, testSize, st.Size(), "what was there is as it was")
	info, err := Inspect(path)
	require.NoError(t, err)
	require.NoError(t, info.HeaderErr)
}

func TestFormatRefuses(t *testing.T) {
	blank := func(*testing.T, string) {}
	write := func(at int64, s string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			t.Helper()
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte(s), at)
			require.NoError(t, err)
			require.NoError(t, f.Truncate(testSize))
			require.NoError(t, f.Close())
		}
	}
	formatted := func(change func(*Options)) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			t.Helper()
			o := testOptions()
			change(&o)
			require.NoError(t, Format(path, o))
		}
	}
	for name, c := range map[string]struct {
		prepare func(*testing.T, string)
		change  func(*Options)
		want    error
		says    string
	}{
		"zero generation":   {blank, func(o *Options) { o.Generation = 0 }, errZeroGeneration, "draw another"},
		"no pool":           {blank, func(o *Options) { o.Pool = [16]byte{} }, nil, "pool id"},
		"size of one byte":  {blank, func(o *Options) { o.Size = 1 }, ErrRange, "multiple of 65536"},
		"only a header":     {blank, func(o *Options) { o.Size = HeaderSpan }, ErrRange, "above"},
		"negative size":     {blank, func(o *Options) { o.Size = -sizeUnit }, ErrRange, "multiple"},
		"size 2^63":         {blank, func(o *Options) { o.Size = 1<<63 - sizeUnit }, ErrRange, "multiple"},
		"missing, no size":  {blank, func(o *Options) { o.Size = 0 }, os.ErrNotExist, "no such file"},
		"this pool's":       {formatted(func(*Options) {}), func(*Options) {}, ErrFormatted, "open it"},
		"another pool's":    {formatted(func(o *Options) { o.Pool[3] = 9 }), func(*Options) {}, ErrForeignHeader, "another pool"},
		"a byte at the end": {write(HeaderSpan-1, "x"), func(*Options) {}, ErrForeignHeader, "data that is not"},
		"Maru's device":     {write(0, "MARUDEV\x00"), func(*Options) {}, ErrForeignHeader, "a Maru device header"},
		"ext4":              {write(0x438, "\x53\xef"), func(*Options) {}, ErrForeignHeader, "ext4"},
		"damaged header":    {write(0, headerMagic+"junk"), func(*Options) {}, ErrCorruptHeader, "force"},
	} {
		t.Run(name, func(t *testing.T) {
			path := onTmpFS(t)
			c.prepare(t, path)
			before, _ := os.ReadFile(path)
			opts := testOptions()
			c.change(&opts)
			err := Format(path, opts)
			require.Error(t, err)
			if c.want != nil {
				require.ErrorIs(t, err, c.want)
			}
			require.ErrorContains(t, err, c.says)
			after, _ := os.ReadFile(path)
			require.True(t, bytes.Equal(before, after), "a refusal writes nothing")
			if c.want == ErrForeignHeader || c.want == ErrCorruptHeader || c.want == ErrFormatted { //nolint:errorlint // table value
				opts.Force = true
				require.NoError(t, Format(path, opts))
				require.NoError(t, open(t, path, Expect{Pool: testPool}).Close())
			}
		})
	}
}

func TestFormatKeepsData(t *testing.T) {
	path := onTmpFS(t)
	data := make([]byte, testSize)
	copy(data[HeaderSpan:], "kept")
	require.NoError(t, os.WriteFile(path, data, 0o600))
	opts := testOptions()
	opts.Size = 0
	require.NoError(t, Format(path, opts))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "kept", string(got[HeaderSpan:][:4]))
	require.EqualValues(t, testSize, open(t, path, Expect{}).Header().Size)
}

func TestInspectNeverWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	require.NoError(t, Format(path, testOptions()))
	require.NoError(t, os.Chmod(path, 0o400))
	before, err := os.Stat(path)
	require.NoError(t, err)
	_, err = Inspect(path)
	require.NoError(t, err)
	after, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, before.ModTime(), after.ModTime())
}

func TestInspectOddPaths(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	for path, want := range map[string]error{
		dir: ErrNotDevice, fifo: ErrNotDevice, "/dev/null": ErrNotDevice, filepath.Join(dir, "none"): os.ErrNotExist,
	} {
		_, err := Inspect(path)
		require.ErrorIs(t, err, want, path)
	}
	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	info, err := Inspect(empty)
	require.NoError(t, err)
	require.ErrorIs(t, info.HeaderErr, ErrNoHeader)
	_, err = Open(empty, Expect{})
	require.ErrorIs(t, err, ErrNoHeader)
	_, err = Open(empty, Expect{Claim: true, ReadOnly: true})
	require.ErrorIs(t, err, ErrReadOnly)
}

func TestOpenExpects(t *testing.T) {
	path := onTmpFS(t)
	require.NoError(t, Format(path, testOptions()))
	for name, want := range map[string]Expect{
		"pool": {Pool: [16]byte{1}}, "device": {Device: [16]byte{1}}, "number": {DeviceID: 4},
	} {
		_, err := Open(path, want)
		var found *ForeignError
		require.ErrorAs(t, err, &found, name)
		require.ErrorIs(t, err, ErrForeignHeader)
		require.NotEmpty(t, found.Hint)
	}
}

// damage overwrites bytes of a closed device.
func damage(t *testing.T, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(b, at)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func TestOneDamagedSlotIsRepaired(t *testing.T) {
	for slot := range int64(slotCount) {
		path := onTmpFS(t)
		require.NoError(t, Format(path, testOptions()))
		damage(t, path, slot*slotStride+70, []byte("rot"))
		info, err := Inspect(path)
		require.NoError(t, err)
		require.NoError(t, info.HeaderErr)
		require.True(t, info.Torn)
		require.EqualValues(t, 41, info.Header.Generation, "either slot alone has the latest generation")
		require.NoError(t, open(t, path, Expect{Claim: true}).Close())
		info, err = Inspect(path)
		require.NoError(t, err)
		require.False(t, info.Torn)
	}
}

func TestBothSlotsDamaged(t *testing.T) {
	path := onTmpFS(t)
	require.NoError(t, Format(path, testOptions()))
	damage(t, path, 70, []byte("rot"))
	damage(t, path, slotStride+70, []byte("rot"))
	_, err := Open(path, Expect{})
	require.ErrorIs(t, err, ErrCorruptHeader)
}

// TestCrashDuringUpdate writes every prefix of an update, and expects the old or the new header after each.
func TestCrashDuringUpdate(t *testing.T) {
	path := onTmpFS(t)
	d := create(t, path, testOptions())
	before, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, d.SetGeneration(42, 2))
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	state := bytes.Clone(before[:headerBytes])
	s, err := decodeSlots(state)
	require.NoError(t, err)
	first := 1 - s.which
	for _, slot := range []int{first, 1 - first} {
		for i := slot * slotStride; i < slot*slotStride+HeaderSize; i++ {
			state[i] = after[i]
			got, err := decodeSlots(state)
			require.NoError(t, err, "torn after byte %d of slot %d", i, slot)
			want := uint64(41)
			if slot != first || i == slot*slotStride+HeaderSize-1 || bytes.Equal(state[first*slotStride:][:HeaderSize],
				after[first*slotStride:][:HeaderSize]) {
				want = 42
			}
			require.Equal(t, want, got.header.Generation)
		}
	}
}

func TestSetGeneration(t *testing.T) {
	media(t, func(t *testing.T, path string, _ Kind) {
		t.Helper()
		owner := create(t, path, testOptions())
		client := open(t, path, Expect{Pool: testPool})
		m := mapAll(t, client, MapOptions{ReadOnly: true})
		require.EqualValues(t, 41, m.Generation())
		require.NoError(t, owner.SetGeneration(42, 2))
		require.EqualValues(t, 42, m.Generation(), "readers see it through memory")
		require.ErrorIs(t, owner.SetGeneration(0, 2), errZeroGeneration)
		require.ErrorIs(t, client.SetGeneration(43, 2), ErrNotClaimed)
		require.EqualValues(t, 42, client.Generation())
		require.NoError(t, owner.Assign(9, 43, 2))
		require.EqualValues(t, 43, m.Generation())
		require.NoError(t, owner.SetGeneration(42, 2))
		require.NoError(t, owner.Close())
		require.ErrorIs(t, owner.SetGeneration(44, 2), ErrClosed)
		h := open(t, path, Expect{}).Header()
		require.EqualValues(t, 42, h.Generation)
		require.EqualValues(t, 2, h.Incarnation)
		require.EqualValues(t, 9, h.DeviceID)
	})
}

func TestGenerationIsNeverTorn(t *testing.T) {
	path := onTmpFS(t)
	owner := create(t, path, testOptions())
	m := mapAll(t, open(t, path, Expect{}), MapOptions{ReadOnly: true})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for last := uint64(0); ; {
				select {
				case <-stop:
					return
				default:
				}
				g := m.Generation()
				if g != 0 && (g < last || g > 1000) {
					t.Errorf("generation %d after %d", g, last)
					return
				}
				last = max(last, g)
			}
		})
	}
	for g := uint64(42); g < 400; g++ {
		require.NoError(t, owner.SetGeneration(g, g))
	}
	close(stop)
	wg.Wait()
}

func TestDoubleClaim(t *testing.T) {
	media(t, func(t *testing.T, path string, _ Kind) {
		t.Helper()
		require.NoError(t, Format(path, testOptions()))
		cmd, said := holder(t, path)
		require.Equal(t, "<nil>\n", said)

		for _, force := range []bool{false, true} {
			_, err := Open(path, Expect{Claim: true, Force: force})
			var held *ClaimedError
			require.ErrorAs(t, err, &held)
			require.ErrorIs(t, err, ErrClaimed)
			require.EqualValues(t, cmd.Process.Pid, held.Claim.PID)
			require.ErrorContains(t, err, "stop that server")
			opts := testOptions()
			opts.Force = force
			require.ErrorIs(t, Format(path, opts), ErrClaimed, "nor may it be formatted")
		}
		require.EqualValues(t, 41, open(t, path, Expect{}).Generation(), "clients need no claim")

		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // reports the kill
		info, err := Inspect(path)
		require.NoError(t, err)
		require.Equal(t, ClaimDead, info.Claim)
		d := open(t, path, Expect{Claim: true})
		_, said = holder(t, path)
		require.Contains(t, said, "claimed", "and the other way round")
		require.NoError(t, d.Close())
		_, said = holder(t, path)
		require.Equal(t, "<nil>\n", said)
	})
}

func TestJudgeClaim(t *testing.T) {
	boot, err := BootID()
	require.NoError(t, err)
	mine, err := ownClaim()
	require.NoError(t, err)
	with := func(change func(*Claim)) Claim {
		c := mine
		change(&c)
		return c
	}
	otherBoot := func(c *Claim) { c.Boot[0]++ }
	for name, c := range map[string]struct {
		claim Claim
		kind  Kind
		want  ClaimState
	}{
		"none":                      {Claim{}, DeviceDAX, ClaimNone},
		"this process":              {mine, DeviceDAX, ClaimAlive},
		"its pid, reused":           {with(func(c *Claim) { c.Start-- }), DeviceDAX, ClaimDead},
		"another container":         {with(func(c *Claim) { c.PIDNamespace++ }), DeviceDAX, ClaimUnknown},
		"this host before a reboot": {with(func(c *Claim) { otherBoot(c); c.Host = HostID() }), DeviceDAX, rebootState()},
		"another host":              {with(func(c *Claim) { otherBoot(c); c.Host = [16]byte{1} }), File, ClaimUnknown},
		"a host without an id":      {with(func(c *Claim) { otherBoot(c); c.Host = [16]byte{} }), File, ClaimUnknown},
		"tmpfs before a reboot":     {with(func(c *Claim) { otherBoot(c); c.Host = [16]byte{1} }), TmpFS, ClaimDead},
	} {
		require.Equal(t, c.want, judgeClaim(c.claim, c.kind), name)
	}
	require.Equal(t, boot, mine.Boot)
}

// rebootState is what a claim of this machine's earlier boot comes to: without a machine id it cannot be told.
func rebootState() ClaimState {
	if HostID() == ([16]byte{}) {
		return ClaimUnknown
	}
	return ClaimDead
}

// rewrite changes the header of a closed device as another host would have written it.
func rewrite(t *testing.T, path string, change func(*Header)) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	s, err := decodeSlots(b)
	require.NoError(t, err)
	change(&s.header)
	for slot := range int64(slotCount) {
		s.header.sequence++
		damage(t, path, slot*slotStride, encode(t, s.header))
	}
}

func TestClaimOfAnotherHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	require.NoError(t, Format(path, testOptions()))
	if info, err := Inspect(path); err != nil || info.Kind != File {
		t.Skip("the temporary directory is not on a disk")
	}
	rewrite(t, path, func(h *Header) { h.Claim = Claim{Host: [16]byte{7}, Boot: [16]byte{8}, PID: 99, Start: 1, Since: 1} })
	_, err := Open(path, Expect{Claim: true})
	require.ErrorIs(t, err, ErrClaimed)
	require.ErrorContains(t, err, "pid 99")
	require.ErrorContains(t, err, "force")
	d := open(t, path, Expect{Claim: true, Force: true})
	require.NoError(t, d.VerifyClaim())

	rewrite(t, path, func(h *Header) { h.Claim = Claim{Host: [16]byte{7}, Boot: [16]byte{8}, PID: 99, Start: 1, Since: 1} })
	require.ErrorIs(t, d.VerifyClaim(), ErrNotClaimed, "taken back by force")
	require.ErrorIs(t, d.SetGeneration(50, 1), ErrNotClaimed)
	require.NoError(t, d.Close())
	info, err := Inspect(path)
	require.NoError(t, err)
	require.EqualValues(t, 99, info.Header.Claim.PID, "another's claim is not ours to clear")
}

func TestVolatileDeviceOfAnotherBootIsLost(t *testing.T) {
	path := onTmpFS(t)
	require.NoError(t, Format(path, testOptions()))
	rewrite(t, path, func(h *Header) { h.BootID[0]++ })
	info, err := Inspect(path)
	require.NoError(t, err)
	require.True(t, info.Lost)
	client := open(t, path, Expect{})
	require.True(t, client.Lost())
	d := open(t, path, Expect{Claim: true})
	require.True(t, d.Lost())
	require.Zero(t, client.Generation(), "nobody may trust the bytes")
	require.NoError(t, d.SetGeneration(77, 3))
	require.False(t, d.Lost())
	require.EqualValues(t, 77, client.Generation())
	info, err = Inspect(path)
	require.NoError(t, err)
	require.False(t, info.Lost)
}

func TestShrunkFileIsRefused(t *testing.T) {
	path := onTmpFS(t)
	require.NoError(t, Format(path, testOptions()))
	for _, size := range []int64{testSize - 1, HeaderSpan, 5000, HeaderSize} {
		require.NoError(t, os.Truncate(path, size))
		_, err := Open(path, Expect{})
		require.ErrorIs(t, err, ErrTruncated, "%d bytes left", size)
	}
}

func TestMemFD(t *testing.T) {
	d := create(t, "memfd:test", testOptions())
	require.Equal(t, MemFD, d.Kind())
	require.Error(t, Format("memfd:test", testOptions()))
	m := mapAll(t, d, MapOptions{Populate: true})
	copy(m.Bytes(), "shared")

	require.True(t, strings.HasPrefix(d.SharePath(), "/proc/"))
	other := open(t, d.SharePath(), Expect{Pool: testPool})
	require.Equal(t, MemFD, other.Kind())
	require.Equal(t, "shared", string(mapAll(t, other, MapOptions{ReadOnly: true}).Bytes()[:6]))
	_, said := holder(t, d.SharePath())
	require.Contains(t, said, "claimed", "another process reaches it and finds it owned")
	require.ErrorIs(t, os.Truncate(d.SharePath(), 4096), unix.EPERM, "sealed")
}

func TestMapRefuses(t *testing.T) {
	path := onTmpFS(t)
	d := create(t, path, testOptions())
	for _, c := range []struct{ offset, length int64 }{
		{0, 4096},
		{HeaderSpan - 1, 1},
		{HeaderSpan, 0},
		{HeaderSpan, -1},
		{HeaderSpan, testSize},
		{testSize, 1},
		{1 << 62, 1 << 62},
		{HeaderSpan, 1<<63 - 1},
		{-1, 10},
	} {
		_, err := d.Map(c.offset, c.length, MapOptions{})
		require.ErrorIs(t, err, ErrRange, "%+v", c)
	}
	_, err := open(t, path, Expect{ReadOnly: true}).Map(HeaderSpan, 4096, MapOptions{})
	require.ErrorIs(t, err, ErrReadOnly)
}

func TestMapUnaligned(t *testing.T) {
	media(t, func(t *testing.T, path string, _ Kind) {
		t.Helper()
		d := create(t, path, testOptions())
		all := mapAll(t, d, MapOptions{HugePages: true, Populate: true})
		part, err := d.Map(HeaderSpan+5001, 7003, MapOptions{})
		require.NoError(t, err)
		copy(part.Bytes(), "here")
		require.Equal(t, "here", string(all.Bytes()[5001:][:4]))
		require.Len(t, part.Bytes(), 7003)
		require.EqualValues(t, HeaderSpan+5001, part.Offset())
		require.ErrorContains(t, d.Close(), "2 mappings are open")
		require.NoError(t, part.Persist(part.Bytes()[1:5]))
		require.NoError(t, part.Persist(nil))
		require.NoError(t, part.Close())
		require.ErrorIs(t, part.Close(), ErrClosed)
	})
}

func TestPersistReachesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	d := create(t, path, testOptions())
	m := mapAll(t, d, MapOptions{})
	page := m.Bytes()[3<<12+10:][:100]
	require.NoError(t, CopyIn(page, bytes.Repeat([]byte("p"), 100)))
	require.NoError(t, m.Persist(page))
	f, err := os.Open(path)
	require.NoError(t, err)
	got := make([]byte, 100)
	_, err = f.ReadAt(got, HeaderSpan+3<<12+10)
	require.NoError(t, err)
	require.Equal(t, page, got)
	require.NoError(t, f.Close())
	require.ErrorIs(t, mapAll(t, d, MapOptions{ReadOnly: true}).Persist(page), ErrReadOnly)
}

func TestPopulateByTouchingChangesNothing(t *testing.T) {
	d := create(t, onTmpFS(t), testOptions())
	m := mapAll(t, d, MapOptions{})
	for i := range m.Bytes() {
		m.Bytes()[i] = byte(i * 7)
	}
	want := bytes.Clone(m.Bytes())
	for _, write := range []bool{false, true} {
		require.NoError(t, touchPages(m.Bytes(), write))
	}
	require.True(t, bytes.Equal(want, m.Bytes()))
}

func TestClaimedErrorNamesWhatIsKnown(t *testing.T) {
	err := error(&ClaimedError{Path: "p", Reason: "r", Hint: "h"})
	require.Equal(t, "cxl: p is claimed: r: h", err.Error())
	require.NotErrorIs(t, err, io.EOF)
}
