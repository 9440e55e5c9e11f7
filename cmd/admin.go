package cmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"larder/protocol"
	"larder/server"
)

// Bounds of talking to an admin.
const (
	adminReply    = 64 << 20               // bytes of a reply that is kept in memory: a page of the longest keys is a tenth
	leaderTries   = 20                     // while the cluster elects one: with leaderPause, twice the default session TTL
	leaderPause   = 250 * time.Millisecond // between them
	adminDialWait = 3 * time.Second        // for one member to accept a connection; then the next is tried
)

// clusterFlags say where a cluster is.
type clusterFlags struct {
	Admin   []string      `placeholder:"HOST:PORT" default:"127.0.0.1:7402" env:"LARDER_ADMIN" help:"Admin addresses of members; any one will do, the others are tried if it is down (default 127.0.0.1:7402)."`
	Addr    []string      `placeholder:"HOST:PORT" default:"127.0.0.1:7400" env:"LARDER_ADDR" help:"Client addresses of members, or unix:PATH (default 127.0.0.1:7400)."`
	Token   string        `env:"LARDER_ADMIN_TOKEN" help:"The servers' admin_token."`
	Timeout time.Duration `help:"How long the command may take (default 30s; 1h for check and snapshot)."`
	JSON    bool          `help:"Print JSON."`
}

// admin is a client of the HTTP admin of a cluster.
type admin struct {
	addrs []string
	token string
	http  *http.Client
}

// newAdmin makes a client of the cluster that the flags name.
func (f *clusterFlags) newAdmin() *admin {
	return &admin{addrs: f.Admin, token: f.Token, http: &http.Client{}}
}

// adminReplyError is a reply that is not 2xx.
type adminReplyError struct {
	status int
	server.AdminError
}

// Error says what went wrong and what to do.
func (e *adminReplyError) Error() string {
	s := e.AdminError.Error
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// get asks the members in turn until one answers, and decodes its JSON into out.
func (a *admin) get(ctx context.Context, path string, query url.Values, out any) error {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return a.anyone(func(addr string) error { return a.call(ctx, addr, http.MethodGet, path, nil, out) })
}

// anyone tries the members in turn while they cannot be reached.
func (a *admin) anyone(try func(addr string) error) error {
	var errs []error
	for _, addr := range a.addrs {
		err := try(addr)
		if failure, ok := errors.AsType[*url.Error](err); !ok {
			return err
		} else if failure.Err != nil {
			err = failure.Err
		}
		errs = append(errs, fmt.Errorf("%s: %w", addr, err))
	}
	return fmt.Errorf("no member answers; is larder serve running, and --admin right?\n%w", errors.Join(errs...))
}

// getLeader is get at the leader, which knows most. Without a leader any member's answer has to do.
func (a *admin) getLeader(ctx context.Context, path string, query url.Values, out any) error {
	if leader, err := a.leader(ctx); err == nil {
		at := *a
		at.addrs = append([]string{leader}, a.addrs...)
		return at.get(ctx, path, query, out)
	}
	return a.get(ctx, path, query, out)
}

// leader finds the leader's admin address.
func (a *admin) leader(ctx context.Context) (string, error) {
	var status server.StatusReply
	if err := a.get(ctx, "/status", nil, &status); err != nil {
		return "", err
	}
	for _, m := range status.Members {
		if m.ID != status.Leader {
			continue
		}
		if m.Admin == "" {
			return "", fmt.Errorf("the leader, member %d, has no admin address", m.ID)
		}
		return m.Admin, nil
	}
	return "", &adminReplyError{AdminError: server.AdminError{
		Error: "the cluster has no leader now", Code: protocol.CodeUnavailable.String(), Retryable: true,
		Hint: "a majority of the members must run and reach each other",
	}}
}

// post sends a change to the leader, and goes on to the next one while leadership moves. It repeats nothing that may
// have been carried out: only refusals and members that cannot be reached at all.
func (a *admin) post(ctx context.Context, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("write request: %w", err)
	}
	for try := 1; ; try++ {
		leader, err := a.leader(ctx)
		if err == nil {
			err = a.call(ctx, leader, http.MethodPost, path, body, out)
		}
		failure, refused := errors.AsType[*adminReplyError](err)
		moving := refused && (failure.Code == protocol.CodeNotLeader.String() || failure.Code == protocol.CodeUnavailable.String())
		if err == nil || !moving || try == leaderTries {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(leaderPause):
		}
	}
}

// call sends one request to one member and decodes its JSON into out, which may be nil.
func (a *admin) call(ctx context.Context, addr, method, path string, body []byte, out any) error {
	response, err := a.do(ctx, addr, method, path, body)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	b, err := io.ReadAll(io.LimitReader(response.Body, adminReply))
	if err != nil {
		return fmt.Errorf("%s: %w", addr, err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("%s answers what larder does not; is it a larder admin? %w", addr, err)
	}
	return nil
}

// do sends one request to one member. The caller closes the body of the response, which is 2xx.
func (a *admin) do(ctx context.Context, addr, method, path string, body []byte) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", addr, err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/json")
	}
	if a.token != "" {
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	response, err := a.http.Do(r)
	if err != nil {
		return nil, err //nolint:wrapcheck // a *url.Error, which callers look for
	}
	if response.StatusCode/100 == 2 {
		return response, nil
	}
	defer response.Body.Close() //nolint:errcheck // opened for reading
	b, err := io.ReadAll(io.LimitReader(response.Body, adminReply))
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", addr, response.Status, err)
	}
	failure := &adminReplyError{status: response.StatusCode}
	if json.Unmarshal(b, &failure.AdminError) != nil || failure.AdminError.Error == "" {
		failure.AdminError.Error = addr + ": " + response.Status + " " + strings.TrimSpace(string(b[:min(len(b), 200)]))
	}
	return nil, failure
}
