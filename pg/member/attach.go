package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"larder/pg/store"
)

// check fills in defaults and refuses what cannot be; it returns this process's slot.
func (cfg *Config) check(self int) (slot int, err error) {
	if cfg.ID == "" || len(cfg.ID) > maxID {
		return 0, &ConfigError{"ID", fmt.Sprintf("has 1 to %d bytes, not %d", maxID, len(cfg.ID))}
	}
	for i := range len(cfg.ID) {
		if c := cfg.ID[i]; c <= ' ' || c == '/' || c > '~' {
			return 0, &ConfigError{"ID", fmt.Sprintf("%.40q has %q: it is printable ASCII without blanks and slashes", cfg.ID, c)}
		}
	}
	if cfg.Cap == 0 {
		cfg.Cap = len(cfg.Ranks)
	}
	if len(cfg.Ranks) == 0 || len(cfg.Ranks) > cfg.Cap || cfg.Cap > MaxCap {
		problem := fmt.Sprintf("is %d, for %d ranks: it is the number of ranks or more, up to %d", cfg.Cap, len(cfg.Ranks), MaxCap)
		return 0, &ConfigError{"Cap", problem}
	}
	if err := checkRanks(cfg.Ranks); err != nil {
		return 0, err
	}
	if cfg.AutoSync && !cfg.AutoDeactivate {
		return 0, ErrPolicy
	}
	if cfg.Hooks == nil {
		return 0, &ConfigError{"Hooks", "are missing"}
	}
	slot = slices.Index(cfg.Ranks, self)
	if slot < 0 {
		return 0, &ConfigError{"Ranks", fmt.Sprintf("do not have this process, %d: %v", self, cfg.Ranks)}
	}
	return slot, nil
}

// spec is how cfg describes the group.
func (cfg *Config) spec() spec {
	return spec{
		Ranks: cfg.Ranks, Founders: len(cfg.Ranks), Cap: cfg.Cap, FirstCap: cfg.Cap,
		AutoDeactivate: cfg.AutoDeactivate, AutoSync: cfg.AutoSync, Retry: cfg.Retry,
	}
}

// differences names what cfg says otherwise than a spec. An extension adopts the group's policies, and may know fewer ranks or more.
func (cfg *Config) differences(s *spec) (list []string) {
	n := min(len(cfg.Ranks), len(s.Ranks))
	exact := len(cfg.Ranks) == s.Founders || cfg.Extension
	if !exact || !slices.Equal(cfg.Ranks[:n], s.Ranks[:n]) {
		list = append(list, fmt.Sprintf("ranks: %v here, %v in the group", cfg.Ranks, s.Ranks))
	}
	if cfg.Cap != s.Cap && cfg.Cap != s.FirstCap {
		list = append(list, fmt.Sprintf("cap: %d here, %d in the group", cfg.Cap, s.Cap))
	}
	for _, x := range []struct {
		name       string
		here, that bool
	}{
		{"AutoDeactivate", cfg.AutoDeactivate, s.AutoDeactivate}, {"AutoSync", cfg.AutoSync, s.AutoSync}, {"Retry", cfg.Retry, s.Retry},
	} {
		if x.here != x.that && !cfg.Extension {
			list = append(list, fmt.Sprintf("%s: %v here, %v in the group", x.name, x.here, x.that))
		}
	}
	return list
}

// attach finds or makes the group's spec. Founders make a group anew whose processes have all gone, and wait for those who have not
// yet.
func (g *Group) attach(ctx context.Context) (s spec, generation uint64, err error) {
	waits := ""
	for {
		changed := g.reg.changes()
		s, generation, lack, err := g.tryAttach(ctx)
		if err == nil && lack == "" {
			return s, generation, nil
		}
		if lack != "" {
			waits = lack
		}
		var unavailable *store.UnavailableError
		if err != nil && !errors.As(err, &unavailable) && !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrNotFound) {
			return spec{}, 0, err
		}
		if ctx.Err() == nil && sleep(RetryPause, changed, ctx.Done()) {
			continue
		}
		if waits == "" {
			waits = fmt.Sprint(err)
		}
		return spec{}, 0, &StartError{Group: g.cfg.ID, Detail: waits, Err: ctx.Err()}
	}
}

// tryAttach is one attempt; lack says what it has to wait for.
func (g *Group) tryAttach(ctx context.Context) (s spec, generation uint64, lack string, err error) {
	st := g.reg.cfg.Store
	e, err := st.Get(ctx, g.key(keySpec))
	if errors.Is(err, store.ErrNotFound) {
		if g.cfg.Extension {
			return s, 0, "no process has made the group that this one extends", nil
		}
		s = g.cfg.spec()
		e, err = st.Put(ctx, g.key(keySpec), encode(s), store.IfAbsent())
		return s, e.Created, "", err //nolint:wrapcheck // attach does
	}
	if err != nil {
		return s, 0, "", err //nolint:wrapcheck // attach does
	}
	s, decodeErr := decodeSpec(e.Value)
	diff := g.cfg.differences(&s)
	if g.cfg.Extension {
		if decodeErr != nil || len(diff) > 0 {
			return s, 0, "", &SpecError{g.cfg.ID, diff}
		}
		return g.extendRanks(ctx, s, e)
	}
	started, living, _, err := g.use(ctx, e.Created)
	switch {
	case err != nil:
		return s, 0, "", err
	case len(living) == 0 && (started || decodeErr != nil || len(diff) > 0): // what an earlier job has left
		err = st.Delete(ctx, g.key(keySpec), store.IfRevision(e.Modified))
		return s, 0, "an earlier group of this name is being removed", err //nolint:wrapcheck // attach does
	case started:
		return s, 0, "it has started without this process, and has slots " + strings.Join(living, ", ") +
			" in use: a process that joins later is an Extension", nil
	case decodeErr != nil || len(diff) > 0:
		return s, 0, "", &SpecError{g.cfg.ID, diff}
	}
	return s, e.Created, "", nil
}

// extendRanks adds the slots that this extension knows of and the group does not.
func (g *Group) extendRanks(ctx context.Context, s spec, e store.Entry) (spec, uint64, string, error) {
	if len(g.cfg.Ranks) <= len(s.Ranks) {
		return s, e.Created, "", nil
	}
	s.Ranks = g.cfg.Ranks
	if len(s.Ranks) > s.Cap {
		problem := fmt.Sprintf("%d ranks here, %d slots in the group: extend it first", len(s.Ranks), s.Cap)
		return s, 0, "", &SpecError{g.cfg.ID, []string{problem}}
	}
	e, err := g.reg.cfg.Store.Put(ctx, g.key(keySpec), encode(s), store.IfRevision(e.Modified))
	return s, e.Created, "", err //nolint:wrapcheck // attach does
}

// use tells whether a group of this name has started, which of its slots are in use, and the revision of its view record.
func (g *Group) use(ctx context.Context, generation uint64) (started bool, living []string, view uint64, err error) {
	list, _, err := g.reg.cfg.Store.List(ctx, g.key(""))
	for i := range list {
		rest := strings.TrimPrefix(list[i].Key, g.key(""))
		if slot, ok := strings.CutPrefix(rest, keySlot); ok {
			living = append(living, slot)
		}
		if rest == keyView {
			view = list[i].Modified
			rec, err := decodeRecord(list[i].Value)
			started = err == nil && rec.Generation == generation && rec.Committed.Epoch > 0
		}
	}
	return started, living, view, err //nolint:wrapcheck // attach does
}

// tidy removes what is left of a group that has started and has no process any more.
func (g *Group) tidy(ctx context.Context) error {
	e, err := g.reg.cfg.Store.Get(ctx, g.key(keySpec))
	if err != nil || e.Created != g.generation {
		return nil //nolint:nilerr // somebody else has done it
	}
	started, living, view, err := g.use(ctx, g.generation)
	if err != nil || !started || len(living) > 0 {
		return err
	}
	if g.reg.cfg.Store.Delete(ctx, g.key(keySpec), store.IfRevision(e.Modified)) == nil {
		_ = g.reg.cfg.Store.Delete(ctx, g.key(keyView), store.IfRevision(view)) // a group made anew takes it for absent in any case
	}
	return nil
}

// confirm makes sure, once our row is there, that the group was not removed meanwhile: that goes by the spec's revision, which this
// changes. It says whether the group is still the one that this process has attached to.
func (g *Group) confirm(ctx context.Context) (bool, error) {
	for touched := false; ; {
		e, err := g.reg.cfg.Store.Get(ctx, g.key(keySpec))
		if errors.Is(err, store.ErrNotFound) || err == nil && e.Created != g.generation {
			return false, nil
		}
		if err == nil && touched {
			return true, nil // by somebody else, which serves as well
		}
		if err == nil {
			_, err = g.reg.cfg.Store.Put(ctx, g.key(keySpec), e.Value, store.IfRevision(e.Modified))
		}
		if err == nil {
			return true, nil
		}
		if touched = errors.Is(err, store.ErrConflict); touched {
			continue
		}
		if _, ok := errors.AsType[*store.UnavailableError](err); !ok {
			return false, err //nolint:wrapcheck // NewGroup does
		}
		if !sleep(RetryPause, nil, ctx.Done()) {
			return false, ctx.Err() //nolint:wrapcheck // NewGroup does
		}
	}
}
