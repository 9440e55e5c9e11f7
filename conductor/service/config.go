package service

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// DefaultPort is where the conductor listens.
const DefaultPort = 13333

// maxConfig bounds a configuration file: some thousand engines.
const maxConfig = 16 << 20

// File is the static configuration, a JSON file: its first two fields are those of other conductors, the rest is this one's own.
type File struct {
	Port      int                        `json:"http_server_port,omitempty"`
	Instances map[string]json.RawMessage `json:"kvevent_instance,omitempty"` // by name, each with the fields of /register

	Listen        string            `json:"listen,omitempty"`         // host:port, in place of the port alone
	Tokens        map[string]string `json:"tokens,omitempty"`         // bearer tokens by tenant; with none, everybody may ask everything
	OperatorToken string            `json:"operator_token,omitempty"` // may ask everything
	Scheduler     json.RawMessage   `json:"scheduler,omitempty"`      // see SchedulerConfig
	Masters       []string          `json:"masters,omitempty"`        // of the pool
	StateDir      string            `json:"state_dir,omitempty"`      // where what is known is kept, besides in the pool

	registrations []registration
}

// DefaultConfigPath is where the configuration is if nobody says otherwise.
func DefaultConfigPath() string {
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".mooncake", "conductor_config.json")
}

// LoadFile reads a configuration file. needed says that it must be there.
func LoadFile(path string, needed bool) (File, error) {
	if path == "" {
		return File{}, nil
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) && !needed {
		return File{}, nil
	}
	if err != nil {
		return File{}, fmt.Errorf("configuration: %w; name another file with --config or CONDUCTOR_CONFIG_PATH", err)
	}
	if info.Size() > maxConfig {
		return File{}, fmt.Errorf("configuration %s: %d bytes, at most %d", path, info.Size(), maxConfig)
	}
	b, err := os.ReadFile(path) //nolint:gosec // the operator's
	if err != nil {
		return File{}, fmt.Errorf("configuration: %w", err)
	}
	f, err := ParseFile(b)
	if err != nil {
		return f, fmt.Errorf("configuration %s: %w", path, err)
	}
	return f, nil
}

// ParseFile reads a configuration. All that is wrong with its instances is said at once.
func ParseFile(b []byte) (File, error) {
	var f File
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return f, fmt.Errorf("not what is expected: %w", err)
	}
	if f.Port < 0 || f.Port > 65535 {
		return f, fmt.Errorf("http_server_port %d: 1 to 65535", f.Port)
	}
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(f.Instances)) {
		reg, err := parseInstance(name, f.Instances[name])
		if err != nil {
			wrong = append(wrong, fmt.Errorf("kvevent_instance %q: %w", name, err))
			continue
		}
		f.registrations = append(f.registrations, reg)
	}
	for tenant, token := range f.Tokens {
		if tenant == "" || tenant == operator || token == "" {
			wrong = append(wrong, fmt.Errorf("tokens: tenant %q needs a name and a token", tenant))
		}
	}
	return f, errors.Join(wrong...)
}

// parseInstance reads one instance. Its name is its instance_id if it has none.
func parseInstance(name string, raw []byte) (reg registration, err error) {
	req, err := cut(raw, registerFields)
	if err != nil {
		return reg, err
	}
	tenant, err := req.text("tenant_id")
	if err != nil {
		return reg, err
	}
	if reg.Service, err = readService(req, tenant); err != nil {
		return reg, err
	}
	if reg.Capacity, err = readCapacity(req, Capacity{}); err != nil {
		return reg, err
	}
	reg.InstanceID = cmp.Or(reg.InstanceID, name)
	return reg, reg.Validate()
}

// Address is where the configuration has the conductor listen, "" if it does not say.
func (f *File) Address() string {
	switch {
	case f.Listen != "":
		return f.Listen
	case f.Port != 0:
		return "127.0.0.1:" + strconv.Itoa(f.Port)
	}
	return ""
}
