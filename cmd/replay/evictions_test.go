package replay

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestEvictionsAreThePoolsOrSaidToBeTheClients: a report never passes the clients' own count off as the pool's.
func TestEvictionsAreThePoolsOrSaidToBeTheClients(t *testing.T) {
	type ask = func(context.Context, []protocol.Member) (ByPhase, error)
	asked := 0
	for name, c := range map[string]struct {
		ask  ask
		want string
	}{
		"nobody to ask":  {nil, `evicted entries +36 of these clients' own; .*--admin`},
		"nobody answers": {func(context.Context, []protocol.Member) (ByPhase, error) { return ByPhase{}, ErrUntold }, "--admin"},
		"the pool's word": {func(_ context.Context, members []protocol.Member) (ByPhase, error) {
			require.NotEmpty(t, members)
			asked++
			return ByPhase{0, 5 * uint64(asked), 3, uint64(asked)}, nil
		}, `evicted entries +5 of the requester's own, 0 of departed owners, 1 of other clients`},
	} {
		var q Request
		for id := range uint64(100) {
			q.HashIDs = append(q.HashIDs, id)
		}
		cfg := config(startPool(t, 64, nil), []Request{q})
		cfg.Evictions = c.ask
		t.Run(name, func(t *testing.T) {
			rep, err := Run(t.Context(), cfg)
			require.NoError(t, err)
			var table bytes.Buffer
			require.NoError(t, rep.WriteTable(&table))
			require.Regexp(t, c.want, table.String())
		})
	}
	cfg := config(startPool(t, 64, nil), []Request{{HashIDs: []uint64{1}}})
	cfg.Evictions = func(context.Context, []protocol.Member) (ByPhase, error) { return ByPhase{}, errors.New("no route") }
	_, err := Run(t.Context(), cfg)
	require.ErrorContains(t, err, "no route")
}
