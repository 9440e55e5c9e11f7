package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/service"
	"larder/examples/proxy/engine"
)

// registration is what /register takes.
type registration struct {
	Endpoint       string `json:"endpoint"`
	ReplayEndpoint string `json:"replay_endpoint"`
	Type           string `json:"type"`
	ModelName      string `json:"modelname"`
	InstanceID     string `json:"instance_id"`
	BlockSize      int    `json:"block_size"`
	DPRank         int    `json:"dp_rank"`
}

// register has a conductor follow an engine, and waits until it does.
func register(t *testing.T, url, id string, e *engine.Engine, engineURL string) {
	t.Helper()
	status, body := post(t, url+"/register", registration{e.EventsEndpoint(), e.ReplayEndpoint(), "vLLM", model, id, blockSize, 0})
	require.Equal(t, http.StatusOK, status, string(body))
	tokens := make([]uint32, blockSize+1)
	require.Eventually(t, func() bool { // a subscription has no answer: what is published before it is lost
		tokens[0]++
		status, _ := post(t, engineURL+pathCompletion, object{"model": model, "prompt": tokens, "max_tokens": 1})
		return status == http.StatusOK && matched(t, url, tokens)[id] > 0
	}, patience, 10*time.Millisecond)
}

// matched asks a conductor how much of a prompt each instance has.
func matched(t *testing.T, url string, tokens []uint32) map[string]int {
	t.Helper()
	status, body := post(t, url+"/query", prompt{Model: model, TokenIDs: tokens, BlockSize: blockSize, TenantID: "default"})
	require.Equal(t, http.StatusOK, status, string(body))
	var all map[string]map[string]match
	require.NoError(t, json.Unmarshal(body, &all))
	longest := map[string]int{}
	for id, m := range all["default"] {
		longest[id] = m.LongestMatched
	}
	return longest
}

// startConductor runs the real conductor with a configuration and gives its URL.
func startConductor(t *testing.T, file string) string {
	t.Helper()
	f, err := service.ParseFile([]byte(file))
	require.NoError(t, err)
	s, err := service.Start(service.Config{Listen: "127.0.0.1:0", File: f})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return "http://" + s.Addr()
}

// script is a conductor that answers what a test wants, and keeps what it is told.
type script struct {
	*httptest.Server

	mu       sync.Mutex
	plan     schedule // what it answers, with the request's name
	status   int
	refusal  object
	full     bool // there is no room to decode
	asked    []scheduling
	reported []report
	tokens   []string // bearer tokens
}

func startScript(t *testing.T) *script {
	t.Helper()
	s := &script{status: http.StatusOK}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /schedule", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		var q scheduling
		_ = json.NewDecoder(r.Body).Decode(&q)
		s.asked = append(s.asked, q)
		s.tokens = append(s.tokens, r.Header.Get("Authorization"))
		if s.status != http.StatusOK {
			w.Header().Set("Retry-After", "7")
			writeJSON(w, s.status, s.refusal)
			return
		}
		plan := s.plan
		plan.RequestID = q.RequestID
		writeJSON(w, http.StatusOK, plan)
	})
	mux.HandleFunc("POST /report", func(w http.ResponseWriter, r *http.Request) {
		var q struct {
			InstanceID string `json:"instance_id"`
			Requests   []progress
		}
		_ = json.NewDecoder(r.Body).Decode(&q)
		s.mu.Lock()
		defer s.mu.Unlock()
		answer := reported{Rejected: []string{}}
		for _, x := range q.Requests {
			s.reported = append(s.reported, report{q.InstanceID, x})
			if x.Event == eventDecodeStart && s.full {
				answer.Rejected = append(answer.Rejected, x.RequestID)
			}
		}
		writeJSON(w, http.StatusOK, answer)
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// events are the reports of the last request, as "instance event".
func (s *script) events() (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.reported {
		if x.progress.RequestID == s.asked[len(s.asked)-1].RequestID {
			list = append(list, x.instance+" "+x.progress.Event)
		}
	}
	return list
}

// awaitEvents waits until the reports of the last request are these. Reports of different instances come in any order.
func (s *script) awaitEvents(t *testing.T, want ...string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(s.events()) >= len(want) }, patience, time.Millisecond, "%v", want)
	require.ElementsMatch(t, want, s.events())
}
