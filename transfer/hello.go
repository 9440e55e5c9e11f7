package transfer

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"time"
)

// hello is the body of a connection's first frame, as JSON, and welcome that of the answer.
type hello struct {
	Engine string `json:"engine"` // who asks
	Kind   string `json:"kind"`   // data, control or rdma
	Conn   uint64 `json:"conn"`   // the asker's number for the connection
	Token  string `json:"token,omitempty"`
}

type welcome struct {
	Engine string `json:"engine"`
	Error  string `json:"error,omitempty"`
}

const (
	kindData    = "data"
	kindControl = "control"
	kindRDMA    = "rdma" // control of RDMA
)

// greetTimeout is how long a peer may take to say who it is, and a connection to be made.
const greetTimeout = 3 * time.Second

// greet says who is there, and returns the id of the engine that answers.
func (e *Engine) greet(ctx context.Context, s *stream, kind string, id uint64) (string, error) {
	body, err := json.Marshal(hello{Engine: e.ID(), Kind: kind, Conn: id, Token: e.cfg.Token})
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(past()) }) // it fails for closed ones only
	defer stop()
	h, answer, err := s.call(&header{kind: frameHello}, body, greetTimeout)
	if err != nil {
		return "", fmt.Errorf("transfer: greet: %w", err)
	}
	var w welcome
	if h.kind != frameWelcome {
		return "", fmt.Errorf("transfer: a frame of type %d for a welcome: is this a transfer engine?", h.kind)
	}
	if err := json.Unmarshal(answer, &w); err != nil {
		return "", fmt.Errorf("transfer: read the welcome: %w", err)
	}
	if w.Error != "" {
		return "", fmt.Errorf("%w: %s", ErrRefused, w.Error)
	}
	return w.Engine, s.conn.SetDeadline(time.Time{})
}

// answerHello reads a connection's first frame and answers it. A hello that is taken is given to welcomed before the peer
// hears of it, and may then send more.
func (e *Engine) answerHello(s *stream, welcomed func(*hello)) (*hello, error) {
	if err := s.conn.SetDeadline(soon(greetTimeout)); err != nil {
		return nil, err
	}
	h, body, err := s.receive()
	if err != nil {
		return nil, err
	}
	var in hello
	out := welcome{Engine: e.ID()}
	switch {
	case h.kind != frameHello:
		return nil, fmt.Errorf("transfer: a frame of type %d for a hello", h.kind)
	case json.Unmarshal(body, &in) != nil:
		out.Error = "the hello is no JSON object"
	case subtle.ConstantTimeCompare([]byte(in.Token), []byte(e.cfg.Token)) != 1:
		out.Error = "wrong token: both processes need the same"
	case in.Kind != kindData && in.Kind != kindControl && (in.Kind != kindRDMA || e.rdma == nil):
		out.Error = fmt.Sprintf("connections of kind %.20q are not known here", in.Kind)
	case len(in.Engine) != 2*len(e.id):
		out.Error = "the engine's id has not 32 digits"
	}
	answer, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	if out.Error == "" {
		welcomed(&in)
	}
	if err := s.send(&header{kind: frameWelcome}, answer); err != nil {
		return nil, err
	}
	if out.Error != "" {
		return nil, fmt.Errorf("%w: %s", ErrRefused, out.Error)
	}
	return &in, s.conn.SetDeadline(time.Time{})
}
