package cmd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/server"
)

// FuzzAdminReply lets an admin answer any status and any bytes: ctl and top take them or say what is wrong, and never
// believe in a leader that no answer named.
func FuzzAdminReply(f *testing.F) {
	var sound server.StatusReply
	sound.Leader, sound.Members = 1, append(sound.Members, server.MemberStatus{ID: 1, Admin: "127.0.0.1:1"})
	status, err := json.Marshal(sound)
	require.NoError(f, err)
	f.Add(uint16(200), status)
	f.Add(uint16(503), []byte(`{"error":"no leader","code":"UNAVAILABLE","hint":"wait","leader":1,"retryable":true}`))
	f.Add(uint16(404), []byte("<html>not found</html>"))
	f.Add(uint16(200), []byte(`{"members":null,"leader":18446744073709551615}`))
	type reply struct {
		status int
		body   []byte
	}
	var next atomic.Pointer[reply]
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		r := next.Load()
		w.WriteHeader(r.status)
		_, _ = w.Write(r.body)
	}))
	f.Cleanup(s.Close)
	client := s.Client()
	f.Cleanup(client.CloseIdleConnections)
	a := &admin{addrs: []string{s.Listener.Addr().String()}, http: client}
	f.Fuzz(func(t *testing.T, status uint16, body []byte) {
		r := &reply{200 + int(status)%400, body}
		if r.status == http.StatusNoContent || r.status == http.StatusNotModified || r.status/100 == 3 {
			t.Skip("no body, or another place")
		}
		next.Store(r)
		leader, err := a.leader(t.Context())
		if err != nil {
			require.NotEmpty(t, err.Error())
			require.Empty(t, leader)
			return
		}
		require.Equal(t, 2, r.status/100)
		require.NotEmpty(t, leader)
		var believed server.StatusReply
		require.NoError(t, json.Unmarshal(body, &believed))
	})
}
