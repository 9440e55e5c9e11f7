package enginehash

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// keysOf turns what JSON has into keys: numbers are ints, and texts that begin with hex: are bytes.
func keysOf(t *testing.T, list []any) (keys Keys) {
	t.Helper()
	for _, v := range list {
		switch x := v.(type) {
		case []any:
			if v = keysOf(t, x); len(x) == 0 {
				v = Keys{}
			}
		case float64:
			v = int(x)
		case string:
			if b, is := strings.CutPrefix(x, "hex:"); is {
				raw, err := hex.DecodeString(b)
				require.NoError(t, err)
				v = raw
			}
		}
		keys = append(keys, v)
	}
	return keys
}

// TestVectors compares with what Python computes: see testdata/make.py.
func TestVectors(t *testing.T) {
	var cases []struct {
		Algorithm, Seed string
		BlockSize       int `json:"block_size"`
		Tokens          []uint32
		Extras          [][]any
		None            string
		Blocks          []string
	}
	b, err := os.ReadFile("testdata/vectors.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &cases))
	require.Len(t, cases, 42)
	for i, c := range cases {
		h, err := New(c.Algorithm, c.Seed)
		require.NoError(t, err)
		require.Equal(t, c.None, hex.EncodeToString(h.None()))
		var extras []Keys
		for _, e := range c.Extras {
			extras = append(extras, keysOf(t, e))
		}
		got, err := h.Blocks(c.Tokens, c.BlockSize, extras)
		require.NoError(t, err)
		require.Len(t, got, len(c.Blocks))
		for k := range got {
			require.Equal(t, c.Blocks[k], hex.EncodeToString(got[k]), "case %d, %s, block %d", i, c.Algorithm, k)
		}
	}
}

// TestPublishedVector is one that the field knows.
func TestPublishedVector(t *testing.T) {
	h, err := New(SHA256CBOR, "0")
	require.NoError(t, err)
	require.Equal(t, "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e", hex.EncodeToString(h.None()))
	blocks, err := h.Blocks([]uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 4, nil)
	require.NoError(t, err)
	require.Len(t, blocks, 2)
	require.Equal(t, "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb", hex.EncodeToString(blocks[0]))
	require.Equal(t, "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6", hex.EncodeToString(blocks[1]))
	require.EqualValues(t, 2164874634404590027, h.Short(blocks[0]))
	require.Equal(t, uint64(17270480062156288726), h.Short(blocks[1]))
}

// TestSGLangsNumber is the first 8 bytes of the digest.
func TestSGLangsNumber(t *testing.T) {
	h, err := New(SGLang, "")
	require.NoError(t, err)
	require.EqualValues(t, 0x0102030405060708, h.Short([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}))
}

// TestDefaultSeed: SHA-256 has one, what can be predicted has none.
func TestDefaultSeed(t *testing.T) {
	for _, algorithm := range []string{SHA256, SHA256CBOR, SHA256Msgpack} {
		with, err := New(algorithm, DefaultSeed)
		require.NoError(t, err)
		without, err := New(algorithm, "")
		require.NoError(t, err)
		require.Equal(t, with.None(), without.None())
	}
	for _, algorithm := range []string{XXHash, XXHashCBOR, XXHashMsgpack} {
		_, err := New(algorithm, "")
		require.ErrorIs(t, err, ErrSeed)
	}
}

// TestKeysOfText: the adapter is part of every block's name, the salt of the first one's.
func TestKeysOfText(t *testing.T) {
	require.Equal(t, []Keys{{"sql", "pepper"}, {"sql"}}, Text("sql", "pepper", 2))
	require.Equal(t, []Keys{{"pepper"}, nil}, Text("", "pepper", 2))
	require.Nil(t, Text("", "", 2))
}

// TestRefused names what is wrong.
func TestRefused(t *testing.T) {
	_, err := New("md5", "")
	require.ErrorIs(t, err, ErrAlgorithm)
	for _, algorithm := range []string{SHA256, SHA256CBOR, SHA256Msgpack} {
		h, err := New(algorithm, "0")
		require.NoError(t, err)
		for _, size := range []int{0, -1, maxBlock + 1} {
			_, err = h.Blocks([]uint32{1}, size, nil)
			require.ErrorIs(t, err, ErrBlockSize)
		}
		_, err = h.Blocks([]uint32{1}, 1, []Keys{{Keys{1.5}}})
		require.ErrorIs(t, err, ErrKey)
	}
}

func BenchmarkBlocks(b *testing.B) {
	tokens := make([]uint32, 512*16)
	for i := range tokens {
		tokens[i] = uint32(i * 7919 % 151936)
	}
	for _, algorithm := range []string{SHA256, SHA256CBOR, SHA256Msgpack, XXHash, SGLang} {
		b.Run(algorithm, func(b *testing.B) {
			h, err := New(algorithm, "0")
			require.NoError(b, err)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := h.Blocks(tokens, 16, nil); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/512, "ns/block")
		})
	}
}
