package meta

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDecodeGroup: what decodes, encodes again to what decodes the same; nothing makes it panic.
func FuzzDecodeGroup(f *testing.F) {
	p := newPool(f)
	g := generator{r: rand.New(rand.NewPCG(7, 7)), p: p}
	p.device(16 * page)
	for range 200 {
		p.now += 3
		g.step()
	}
	for _, group := range p.log {
		f.Add(group)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		group, err := DecodeGroup(data)
		if err != nil || len(data) == 0 {
			return
		}
		again := BeginGroup(nil, group.NowMS, group.Touches)
		for _, c := range group.Commands {
			kind := c.Header.Kind
			again = AppendCommand(again, c.Header, c.Command)
			require.Contains(t, []Kind{kind, KindPin, KindUnpin}, c.Command.Kind())
		}
		got, err := DecodeGroup(again)
		require.NoError(t, err)
		for i := range got.Commands { // of a pin, the body says whether it is one to undo
			got.Commands[i].Header.Kind = group.Commands[i].Header.Kind
		}
		require.Equal(t, group, got)
	})
}
