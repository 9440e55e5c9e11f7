package store

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"larder/client"
)

// DefaultPrefix is where in a tenant's names a store lies whose URL names no prefix.
const DefaultPrefix = "pg/"

// URLError says what is wrong with the URL of a store.
type URLError struct {
	URL, Problem string
}

// Error describes e for people.
func (e *URLError) Error() string {
	return fmt.Sprintf("store %.200q: %s; a store is masters://host:port,host:port[?tenant=NAME&prefix=TEXT], file:///directory or "+
		"tcp://host:port", e.URL, e.Problem)
}

// Open opens the store that a URL names, with a lease of at least MinLease, or DefaultLease if it is 0:
//
//	masters://host:port,host:port[?tenant=NAME&prefix=TEXT]   addresses as client.Config has them, unix:/path included
//	file:///directory
//	tcp://host:port
//
// The error is a *[URLError] if it is none of these. Else Open waits for the store until ctx is over, or ten seconds have passed
// if ctx has no deadline, and fails with an *[UnavailableError].
func Open(ctx context.Context, rawURL string, lease time.Duration) (Store, error) {
	t, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	switch t.scheme {
	case "masters":
		return Masters(ctx, client.Config{Addrs: t.addrs, Tenant: t.tenant}, t.prefix, lease)
	case "file":
		return Directory(ctx, t.path, lease)
	default:
		return Dial(ctx, t.addrs[0], lease)
	}
}

// target is what a URL names.
type target struct {
	scheme         string
	addrs          []string // masters, tcp
	tenant, prefix string   // masters
	path           string   // file
}

// parseURL reads the URL of a store. net/url takes no lists of hosts.
func parseURL(raw string) (t target, err error) {
	wrong := func(format string, args ...any) (target, error) {
		return target{}, &URLError{raw, fmt.Sprintf(format, args...)}
	}
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return wrong("it has no scheme")
	}
	t.scheme = scheme
	where, query, _ := strings.Cut(rest, "?")
	values, err := url.ParseQuery(query)
	if err != nil {
		return wrong("its query cannot be read: %v", err)
	}
	switch scheme {
	case "masters":
		t.addrs = strings.Split(where, ",")
		t.tenant, t.prefix = values.Get("tenant"), DefaultPrefix
		if values.Has("prefix") {
			t.prefix = values.Get("prefix")
		}
		values.Del("tenant")
		values.Del("prefix")
	case "file":
		if t.path, err = url.PathUnescape(where); err != nil || !filepath.IsAbs(t.path) {
			return wrong("%q is no absolute path", where)
		}
	case "tcp":
		t.addrs = []string{where}
	default:
		return wrong("the scheme %.20q is not known", scheme)
	}
	for name := range values {
		return wrong("it has no option %.20q", name)
	}
	for _, addr := range t.addrs {
		if path, unix := strings.CutPrefix(addr, "unix:"); unix && scheme == "masters" && filepath.IsAbs(path) {
			continue
		}
		_, port, err := net.SplitHostPort(addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return wrong("the address %.80q is not host:port", addr)
		}
	}
	return t, nil
}
