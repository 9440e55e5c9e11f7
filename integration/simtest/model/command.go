package model

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// result is what a command must answer: a code and, with code 0, a value as decoded by the kind's Decode function, nil
// if there is none.
type result struct {
	code  protocol.Code
	value any
}

func refused(c protocol.Code) result { return result{code: c} }

// command carries out one command, once, and compares its result.
func (w *world) command(h meta.Header, c meta.Command, got *meta.Results, span *meta.Span) error {
	if span.Header != h {
		return w.violation("results come in the order of the commands", h, span.Header)
	}
	raw := got.Bytes(span)
	var s *session
	if h.Session != 0 {
		if s = w.sessions[h.Session]; s == nil || !s.open {
			return w.compare(refused(protocol.CodeSessionExpired), h.Kind, raw, span.Remembered)
		}
	}
	protected := s != nil && h.Seq != 0
	if protected {
		s.ack(h.Acked)
		if a, ok := s.answers[h.Seq]; ok && !a.canceled {
			return w.compareAgain(a.result, raw, span.Remembered)
		}
		if code := s.refuses(h.Seq); code != 0 {
			return w.compare(refused(code), h.Kind, raw, span.Remembered)
		}
	}
	want, err := w.execute(h, s, c, raw)
	if err != nil {
		return err
	}
	if err := w.compare(want, h.Kind, raw, span.Remembered); err != nil {
		return err
	}
	if protected && s.open && !want.code.Retryable() {
		s.answers[h.Seq] = answer{result: bytes.Clone(raw)}
	}
	return nil
}

// compareAgain compares what a repeated command answered with what it answered the first time.
func (w *world) compareAgain(first, raw []byte, remembered bool) error {
	if !bytes.Equal(first, raw) || !remembered {
		return w.violation("a repeated seq gets the answer that it got before, byte for byte, and is not executed",
			fmt.Sprintf("%x, remembered", first), fmt.Sprintf("%x, remembered: %v", raw, remembered))
	}
	return nil
}

// compare compares a result with what it must be.
func (w *world) compare(want result, k meta.Kind, raw []byte, remembered bool) error {
	if remembered {
		return w.violation("only a seq that was answered before is answered from memory", "a new answer", "a remembered one")
	}
	code, body, err := meta.DecodeCode(raw)
	if err != nil {
		return w.violation("results decode", "a code", fmt.Sprintf("%x", raw))
	}
	if code != want.code {
		return w.violation("the code", fmt.Sprint(want.code, " ", describe(want.value)), fmt.Sprintf("%v %x", code, body))
	}
	if code != 0 {
		if len(body) != 0 {
			return w.violation("nothing follows a code other than 0", "", fmt.Sprintf("%x", body))
		}
		return nil
	}
	value, err := decode(k, body)
	if err != nil {
		return w.violation("results decode", want.value, fmt.Sprintf("%x", body))
	}
	if !equal(want.value, value) {
		return w.violation("the result", want.value, value)
	}
	return nil
}

// decode decodes the result of a kind of command after its code 0.
func decode(k meta.Kind, body []byte) (any, error) {
	switch k {
	case meta.KindOpenSession:
		return meta.DecodeSession(body)
	case meta.KindAlloc:
		return meta.DecodeAlloc(body)
	case meta.KindRegister:
		return decodeRegister(body)
	case meta.KindDelete:
		return meta.DecodeDelete(body)
	case meta.KindPin, meta.KindUnpin, meta.KindCancel:
		return meta.DecodeCodes(body)
	case meta.KindSweep, meta.KindEmptyRegion, meta.KindExpirePins, meta.KindAddDevice, meta.KindTask:
		return meta.DecodeCount(body)
	case meta.KindPutName, meta.KindDeleteName:
		return meta.DecodeName(body)
	case meta.KindMaru:
		return decodeMaru(body)
	default:
		if len(body) != 0 {
			return nil, meta.ErrCorrupt
		}
		return nil, nil //nolint:nilnil // no value is the value of these
	}
}

func decodeRegister(body []byte) ([]meta.RegisterResult, error) {
	it := meta.DecodeRegister(body)
	var all []meta.RegisterResult
	for r := (meta.RegisterResult{}); it.Next(&r); {
		all = append(all, r)
	}
	return all, it.Err()
}

// equal compares results; no difference is made between nothing and an empty list.
func equal(a, b any) bool { return reflect.DeepEqual(normal(a), normal(b)) }

func normal(v any) any {
	switch v := v.(type) {
	case meta.AllocResult:
		v.Found, v.Evicted = emptyNil(v.Found), normalPages(v.Evicted)
		return v
	case meta.DeleteResult:
		v.Codes, v.Freed = emptyNil(v.Codes), normalPages(v.Freed)
		return v
	case []meta.RegisterResult:
		v = slices.Clone(v)
		for i := range v {
			v[i].Key = emptyNil(v[i].Key)
		}
		return emptyNil(v)
	case []protocol.Code:
		return emptyNil(v)
	case meta.Page:
		v.Key = emptyNil(v.Key)
		return v
	default:
		return v
	}
}

func normalPages(pages []meta.Page) []meta.Page {
	pages = emptyNil(slices.Clone(pages))
	for i := range pages {
		pages[i].Key = emptyNil(pages[i].Key)
	}
	return pages
}

func emptyNil[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return s
}

// execute carries out a command that is to be applied. raw is its real result, for where the specification leaves a
// choice.
func (w *world) execute(h meta.Header, s *session, c meta.Command, raw []byte) (result, error) {
	switch c := c.(type) {
	case *meta.OpenSession:
		return w.openSession(c), nil
	case *meta.CloseSession:
		return w.closeSession(c), nil
	case *meta.Fence:
		return w.fence(c), nil
	case *meta.Alloc:
		return w.alloc(s, c, raw)
	case *meta.ReturnRegion:
		return w.returnRegion(s, c), nil
	case *meta.Register:
		return w.register(s, c), nil
	case *meta.Delete:
		return w.delete(s, c), nil
	case *meta.Pin:
		return w.pin(s, c), nil
	case *meta.Cancel:
		return w.cancel(s, h, c), nil
	case *meta.Clear:
		return w.clear(s, c), nil
	case *meta.Sweep:
		return w.sweep(c, raw), nil
	case *meta.SetSettings:
		return w.setSettings(c, raw)
	case *meta.NewIncarnation:
		return w.newIncarnation(c), nil
	case *meta.ExpirePins:
		return w.expirePins(), nil
	case *meta.SetTenant:
		return w.setTenant(c), nil
	default:
		return w.executeSpace(s, c)
	}
}

// executeSpace carries out commands about regions, devices and names.
func (w *world) executeSpace(s *session, c meta.Command) (result, error) {
	switch c := c.(type) {
	case *meta.Mark:
		return w.mark(c), nil
	case *meta.RevokeDone:
		return w.revokeDone(s, c), nil
	case *meta.FreeRegion:
		return w.freeRegion(c), nil
	case *meta.EmptyRegion:
		return w.emptyRegion(c), nil
	case *meta.AddDevice:
		return w.addDevice(c), nil
	case *meta.Retire:
		return w.retire(c), nil
	case *meta.DropDevice:
		return w.dropDevice(c), nil
	case *meta.PutName:
		return w.putName(s, c), nil
	case *meta.DeleteName:
		return w.deleteName(s, c), nil
	case *meta.Maru:
		return w.maruCommand(c), nil
	default:
		return w.executeTiers(c)
	}
}

// executeTiers carries out commands about homes, their devices and their tasks.
func (w *world) executeTiers(c meta.Command) (result, error) {
	switch c := c.(type) {
	case *meta.SetDevice:
		return w.setDevice(c), nil
	case *meta.FencedRegion:
		return w.fencedRegion(c), nil
	case *meta.AddTask:
		return w.addTask(c), nil
	case *meta.TaskDone:
		return w.taskDone(c), nil
	case *meta.CancelTask:
		return w.cancelTask(c), nil
	default:
		return result{}, fmt.Errorf("model: %T is not known to it: teach it", c)
	}
}

// kindNames are the names of commands in reports.
var kindNames = [...]string{
	meta.KindOpenSession: "open session", meta.KindCloseSession: "close session", meta.KindFence: "fence",
	meta.KindAlloc: "alloc", meta.KindReturn: "return", meta.KindRegister: "register", meta.KindDelete: "delete",
	meta.KindPin: "pin", meta.KindUnpin: "unpin", meta.KindCancel: "cancel", meta.KindClear: "clear",
	meta.KindSweep: "sweep", meta.KindMark: "mark", meta.KindRevokeDone: "revoke done",
	meta.KindFreeRegion: "free region", meta.KindAddDevice: "add device", meta.KindRetire: "retire",
	meta.KindDropDevice: "drop device", meta.KindSettings: "settings", meta.KindIncarnation: "incarnation",
	meta.KindEmptyRegion: "empty region", meta.KindExpirePins: "expire pins", meta.KindTenant: "tenant",
	meta.KindDevice: "device", meta.KindTask: "task", meta.KindTaskDone: "task done", meta.KindCancelTask: "cancel task",
	meta.KindFencedRegion: "fenced region", meta.KindPutName: "put name", meta.KindDeleteName: "delete name",
	meta.KindMaru: "maru",
}

func kindName(k meta.Kind) string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", k)
}

// describe writes a value for people: keys as text.
func describe(v any) string {
	switch v := v.(type) {
	case meta.AllocResult:
		return fmt.Sprintf("phase %d, given %v %+v, evicted %s, occupied %d, keys %d found %x", v.Phase, v.Given, v.Location,
			describe(v.Evicted), v.Occupied, v.Keys, v.Found)
	case meta.DeleteResult:
		return fmt.Sprintf("%v, freed %s", v.Codes, describe(v.Freed))
	case meta.Page:
		of := ""
		if v.Copy {
			of = "a copy of "
		}
		return fmt.Sprintf("%s%q slot %d, region %d of session %d at %d+%d", of, v.Key, v.Slot, v.Region, v.Owner, v.Offset, v.Length)
	case []meta.Page:
		return describeAll(v)
	case meta.Effect:
		return fmt.Sprintf("%s (%s)", describe(v.Page), v.Reason)
	case []meta.Effect:
		return describeAll(v)
	case meta.RegisterResult:
		return fmt.Sprintf("{new %v, %v, key %q, existing %+v}", v.New, v.Code, v.Key, v.Existing)
	case []meta.RegisterResult:
		return describeAll(v)
	default:
		return fmt.Sprintf("%+v", v)
	}
}

func describeAll[T any](list []T) string {
	var b []byte
	for _, v := range list {
		b = fmt.Appendf(b, "[%s]", describe(v))
	}
	return fmt.Sprintf("%d: %s", len(list), b)
}
