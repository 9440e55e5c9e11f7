package service

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var testFields = []string{"model", "token_ids", "seq_hashes", "block_size", "x"}

// reason cuts a body and reads all of its fields, and says how it was refused: reason, field and index.
func reason(body string) string {
	req, err := cut([]byte(body), testFields)
	if err == nil {
		_, err = req.text("model")
	}
	if err == nil {
		_, err = req.number("block_size", 1, maxBlockSize, 1)
	}
	if err == nil && req.raw("token_ids") != nil {
		_, err = req.tokens()
	}
	if err == nil && req.raw("seq_hashes") != nil {
		_, err = req.hashes("seq_hashes")
	}
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		return ""
	}
	s := e.Reason + " " + e.Field
	if e.Index != nil {
		s += " " + strconv.Itoa(*e.Index)
	}
	return strings.TrimSpace(s)
}

// TestBadRequests: what is wrong is said, with the field and the element where it is.
func TestBadRequests(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{"model":"m","token_ids":[0,1,4294967295],"block_size":16}`, ""},
		{" {\n\"model\" : \"m\" , \"token_ids\" : [ ] } ", ""},
		{`{"token_ids":null}`, ""},
		{`{"x":{"a":[1,{"b":"}"}]},"model":"\"{"}`, ""},
		{``, "invalid_json"},
		{`[]`, "invalid_json"},
		{`{"model":"m"`, "invalid_json"},
		{`{"model":"m"} {}`, "invalid_json"},
		{`{"model" "m"}`, "invalid_json"},
		{`{"model":}`, "invalid_json"},
		{`{"model":"m" "x":1}`, "invalid_json"},
		{`{model:"m"}`, "invalid_json"},
		{`{"model":"m}`, "invalid_json"},
		{"{\"model\":\"\xff\"}", "invalid_json"},
		{`{"x":` + strings.Repeat("[", 100), "invalid_json"},
		{`{"model":"m","model":"n"}`, "invalid_json model"},
		{`{"modell":"m"}`, "unknown_field modell"},
		{`{"model":1}`, "invalid_type model"},
		{`{"model":"` + strings.Repeat("m", maxText+1) + `"}`, "out_of_range model"},
		{`{"block_size":0}`, "out_of_range block_size"},
		{`{"block_size":1.5}`, "invalid_type block_size"},
		{`{"block_size":"16"}`, "invalid_type block_size"},
		{`{"token_ids":"1,2"}`, "not_array token_ids"},
		{`{"token_ids":[1,-1]}`, "out_of_range token_ids 1"},
		{`{"token_ids":[1,2,4294967296]}`, "out_of_range token_ids 2"},
		{`{"token_ids":[99999999999999999999]}`, "out_of_range token_ids 0"},
		{`{"token_ids":[1.5]}`, "invalid_type token_ids 0"},
		{`{"token_ids":[1,]}`, "invalid_type token_ids 1"},
		{`{"token_ids":[1 2]}`, "invalid_type token_ids 0"},
		{`{"token_ids":[01]}`, "invalid_type token_ids 0"},
		{`{"token_ids":[true]}`, "invalid_type token_ids 0"},
		{`{"token_ids":[1}]}`, "invalid_json"},
		{`{"seq_hashes":[18446744073709551615,-9223372036854775808]}`, ""},
		{`{"seq_hashes":[18446744073709551616]}`, "out_of_range seq_hashes 0"},
		{`{"seq_hashes":[-9223372036854775809]}`, "out_of_range seq_hashes 0"},
		{`{"seq_hashes":["0xff","18446744073709551615","-1"]}`, ""},
		{`{"seq_hashes":["1","one"]}`, "invalid_value seq_hashes 1"},
		{`{"seq_hashes":["1",2]}`, "invalid_type seq_hashes"},
	} {
		require.Equal(t, c.want, reason(c.body), c.body)
	}
	most := "[0" + strings.Repeat(",0", maxTokens-1)
	require.Empty(t, reason(`{"token_ids":`+most+`]}`))
	require.Equal(t, "out_of_range token_ids 1048576", reason(`{"token_ids":`+most+`,0]}`))
}

// TestSignedHashes: engines that sign their hashes mean the same bits.
func TestSignedHashes(t *testing.T) {
	req, err := cut([]byte(`{"seq_hashes":[-1,18446744073709551615],"x":["-1","0xffffffffffffffff"]}`), testFields)
	require.NoError(t, err)
	for _, name := range []string{"seq_hashes", "x"} {
		list, err := req.hashes(name)
		require.NoError(t, err)
		require.Equal(t, []uint64{math.MaxUint64, math.MaxUint64}, list)
	}
}

// FuzzRequest: what is read is what encoding/json reads, and what that refuses is refused.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"model":"m","token_ids":[0,1,2],"block_size":16,"x":{"a":"\\\""}}`))
	f.Add([]byte(`{"model":"\u00e4","seq_hashes":["0x1","-2"]}`))
	f.Add([]byte(`{"seq_hashes":[-1,18446744073709551615],"x":[[1],{"b":2}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		req, err := cut(body, testFields)
		if err != nil {
			return
		}
		var other map[string]json.RawMessage
		whole := json.Unmarshal(body, &other) == nil
		for _, field := range req.fields {
			if whole {
				require.Equal(t, string(other[field.name]), string(bytes.TrimSpace(field.raw)))
			}
		}
		if list, err := req.tokens(); err == nil {
			var same []uint32
			require.NoError(t, json.Unmarshal(req.raw("token_ids"), &same))
			require.Equal(t, same, list)
		}
		if s, err := req.text("model"); err == nil && s != "" {
			var same string
			require.NoError(t, json.Unmarshal(req.raw("model"), &same))
			require.Equal(t, same, s)
		}
		_, _ = req.hashes("seq_hashes")
		_, _ = req.number("block_size", 1, 10, 1)
	})
}

// BenchmarkTokens reads a query of 8,192 tokens.
func BenchmarkTokens(b *testing.B) {
	body := []byte(`{"model":"m","block_size":16,"token_ids":[` + strings.Repeat("12345,", 8191) + `1]}`)
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		req, err := cut(body, testFields)
		if err != nil {
			b.Fatal(err)
		}
		if list, err := req.tokens(); err != nil || len(list) != 8192 {
			b.Fatal(err, len(list))
		}
	}
}
