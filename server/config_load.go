package server

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"
)

// maxConfigBytes bounds a configuration file: the longest sensible one has some hundred lines.
const maxConfigBytes = 1 << 20

// Load builds a configuration: defaults, then the YAML file at path ("" = none), then the LARDER_ variables of
// environ ("name=value", as os.Environ gives them), then flags (option name in the file -> values). It completes and
// validates the result, and returns all errors at once.
func Load(path string, environ []string, flags map[string][]string) (Config, error) {
	c := Default()
	var errs []error
	if path != "" {
		errs = append(errs, c.readFile(path))
	}
	errs = append(errs, c.readEnv(environ), c.readFlags(flags))
	unread := unreadNames(errors.Join(errs...))
	for _, err := range parts(errors.Join(c.Complete(), c.Validate())) {
		// What is said of an option that could not be read, or compares another one with it, is said of its default.
		if !slices.ContainsFunc(unread, func(name string) bool { return mentions(err.Error(), name) }) {
			errs = append(errs, err)
		}
	}
	return c, errors.Join(errs...)
}

// fileError is what is wrong with a configuration file.
type fileError struct {
	path string
	err  error
}

// Error implements error.
func (e *fileError) Error() string { return fmt.Sprintf("configuration %s:\n%v", e.path, e.err) }

// Unwrap gives the cause.
func (e *fileError) Unwrap() error { return e.err }

// valueError says that an option's value could not be read.
type valueError struct {
	name string
	err  error
}

// Error implements error.
func (e *valueError) Error() string { return e.name + ": " + e.err.Error() }

// Unwrap gives the cause.
func (e *valueError) Unwrap() error { return e.err }

// parts splits joined errors.
func parts(err error) (list []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	switch {
	case err == nil:
	case ok:
		for _, e := range joined.Unwrap() {
			list = append(list, parts(e)...)
		}
	default:
		list = append(list, err)
	}
	return list
}

// Problems lists what an error of Load consists of, in the order of the layers.
func Problems(err error) []string {
	list := []string{}
	for _, e := range parts(err) {
		if f, ok := errors.AsType[*fileError](e); ok {
			list = append(list, Problems(f.err)...)
		} else {
			list = append(list, e.Error())
		}
	}
	return list
}

// unreadNames lists the options whose values could not be read.
func unreadNames(err error) (names []string) {
	for _, e := range parts(err) {
		if f, ok := errors.AsType[*fileError](e); ok {
			names = append(names, unreadNames(f.err)...)
		} else if v, ok := errors.AsType[*valueError](e); ok {
			names = append(names, v.name)
		}
	}
	return names
}

// mentions reports whether a text has a name in it, as a word of its own.
func mentions(text, name string) bool {
	return slices.Contains(strings.FieldsFunc(text, func(r rune) bool {
		return r != '_' && (r < 'a' || r > 'z')
	}), name)
}

// readFile applies a YAML file.
func (c *Config) readFile(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	if info.Size() > maxConfigBytes {
		return fmt.Errorf("configuration %s: %d bytes, more than a configuration can have", path, info.Size())
	}
	b, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	if err := c.ReadYAML(b); err != nil {
		return &fileError{path, err}
	}
	return nil
}

// ReadYAML applies a YAML document of flat keys. All wrong keys and values are reported, each with its line.
func (c *Config) ReadYAML(b []byte) error {
	if len(b) > maxConfigBytes {
		return errors.New("the document is too long")
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return fmt.Errorf("not YAML: %w", err)
	}
	if len(doc.Content) == 0 {
		return nil
	}
	return readMapping(doc.Content[0], reflect.ValueOf(c).Elem())
}

// readEnv applies the variables that name an option. Others with the prefix are left alone: container platforms
// invent some, such as LARDER_PORT for a service called larder.
func (c *Config) readEnv(environ []string) error {
	var errs []error
	for _, option := range Options() {
		for _, kv := range environ {
			name, value, _ := strings.Cut(kv, "=")
			if name != option.Env {
				continue
			}
			if err := c.Set(option.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", option.Env, err))
			}
		}
	}
	return errors.Join(errs...)
}

// readFlags applies flags in the order of the options.
func (c *Config) readFlags(flags map[string][]string) error {
	names := make([]string, 0, len(flags))
	for name := range flags {
		names = append(names, name)
	}
	slices.Sort(names)
	var errs []error
	for _, name := range names {
		if err := c.Set(name, flags[name]...); err != nil {
			errs = append(errs, fmt.Errorf("flag --%s: %w", strings.ReplaceAll(name, "_", "-"), err))
		}
	}
	return errors.Join(errs...)
}

// readMapping sets the fields of a struct from a YAML mapping.
func readMapping(node *yaml.Node, target reflect.Value) error {
	if node.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: expected keys with values, as in \"listen: 127.0.0.1:7400\"", node.Line)
	}
	var errs []error
	seen := make(map[string]int)
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if line, twice := seen[key.Value]; twice {
			errs = append(errs, fmt.Errorf("line %d: %s was given before, on line %d", key.Line, clip(key.Value), line))
			continue
		}
		seen[key.Value] = key.Line
		field, ok := fieldByTag(target, key.Value)
		if !ok {
			errs = append(errs, fmt.Errorf("line %d: %w", key.Line, unknownName(key.Value, tagNames(target.Type()))))
			continue
		}
		if err := readValue(value, field); err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", value.Line, &valueError{key.Value, err}))
		}
	}
	return errors.Join(errs...)
}

// readValue sets one field from a YAML node.
func readValue(node *yaml.Node, field reflect.Value) error {
	switch node.Kind {
	case yaml.ScalarNode:
		if node.Tag == "!!null" {
			return errors.New("the value is missing; leave the key out to have the default")
		}
		return setValues(field, []string{node.Value})
	case yaml.SequenceNode:
		if field.Kind() != reflect.Slice {
			return errors.New("one value is expected, not a list")
		}
		return readList(node, field)
	case yaml.MappingNode:
		if field.Kind() == reflect.Slice {
			return errors.New("a list is expected: put \"- \" before each item")
		}
	default: // an alias
	}
	return errors.New("one value is expected, written out")
}

// readList sets a list of scalars in text form, or of mappings.
func readList(node *yaml.Node, field reflect.Value) error {
	list := reflect.MakeSlice(field.Type(), 0, len(node.Content))
	var errs []error
	for _, item := range node.Content {
		elem := reflect.New(field.Type().Elem()).Elem()
		var err error
		switch item.Kind {
		case yaml.MappingNode:
			err = readMapping(item, elem)
			if p, ok := reflect.TypeAssert[*PeerConfig](elem.Addr()); ok && err == nil {
				err = p.complete()
			}
		case yaml.ScalarNode:
			err = setScalar(elem, item.Value)
		default:
			err = errors.New("write the item as one text or as keys with values")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", item.Line, err))
		}
		list = reflect.Append(list, elem)
	}
	field.Set(list)
	return errors.Join(errs...)
}

// Complete fills in the fields that are empty and follow from others or from this host, and returns every error at that.
func (c *Config) Complete() error {
	var errs []error
	if c.DataDir == "" {
		dir, err := defaultDataDir()
		errs = append(errs, err)
		c.DataDir = dir
	}
	if c.Socket == "" {
		c.Socket = filepath.Join(c.DataDir, "larder.sock")
	}
	if c.Advertise == "" {
		c.Advertise = Advertised(c.Listen)
	}
	if c.PeerAdvertise == "" {
		c.PeerAdvertise = Advertised(c.PeerListen)
	}
	if c.MaruRMAdvertise == "" && c.MaruRM != "" {
		c.MaruRMAdvertise = Advertised(c.MaruRM)
	}
	if c.TransferListen == "" {
		c.TransferListen = c.defaultTransfer()
	}
	if len(c.Pool) == 0 {
		c.Pool = []DeviceConfig{{}}
	}
	c.Pool = slices.Clone(c.Pool)
	for i := range c.Pool {
		errs = append(errs, c.completeDevice(&c.Pool[i]))
	}
	return errors.Join(errs...)
}

// defaultTransfer is where transfers are listened for, if anybody needs them: clients of other hosts, or, for what can only
// be reached so, any.
func (c *Config) defaultTransfer() string {
	host, _, err := net.SplitHostPort(c.Listen)
	switch {
	case c.DRAM == 0 && c.SSD == "" && (err != nil || isLoopback(c.Listen)):
		return Off
	case err != nil:
		host = "127.0.0.1" // clients have the socket alone
	}
	return net.JoinHostPort(host, DefaultNodePort)
}

// defaultDataDir is ./data where that exists or the directory is a checkout, else a directory of the user's.
func defaultDataDir() (string, error) {
	if info, err := os.Stat("data"); err == nil && info.IsDir() {
		return "data", nil
	}
	if _, err := os.Stat("go.mod"); err == nil && unix.Access(".", unix.W_OK) == nil {
		return "data", nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "larder"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no place for the data: %w; set --data-dir", err)
	}
	return filepath.Join(home, ".local", "state", "larder"), nil
}

// Advertised is the address that others reach listen at: a wildcard host becomes the host's name.
func Advertised(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return listen
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	return net.JoinHostPort(host, port)
}

// Bounds of the default pool file.
const (
	shmDir         = "/dev/shm"
	maxDefaultPool = 1 << 30
	minDefaultPool = 16 << 20
	poolAlign      = 2 << 20  // a huge page
	poolUnit       = 64 << 10 // what cxl.Format takes: a multiple of every host's page
)

// completeDevice gives a device that names no path a file in /dev/shm, or in the data directory where there is none,
// and one without a size that does not exist yet half of the free space there.
func (c *Config) completeDevice(d *DeviceConfig) error {
	if d.Tier == "" {
		d.Tier = "cxl"
	}
	if d.Path == "" {
		d.Path = filepath.Join(shmDir, c.ClusterName+".pool")
		if unix.Access(shmDir, unix.W_OK) != nil {
			d.Path = filepath.Join(c.DataDir, "pool")
		}
	}
	if d.Coherence == "" {
		d.Coherence = DefaultCoherence(d.Path)
	}
	if d.Size != 0 || strings.HasPrefix(d.Path, "memfd:") {
		return nil
	}
	if _, err := os.Stat(d.Path); err == nil {
		return nil // the size that it has
	}
	free, err := freeSpace(filepath.Dir(d.Path))
	if err != nil {
		return fmt.Errorf("pool device %s: %w; give it a size, as in --pool %s,size=1GiB", d.Path, err, d.Path)
	}
	size := min(free/2, maxDefaultPool) &^ (poolAlign - 1)
	if size < minDefaultPool {
		return fmt.Errorf("pool device %s: only %s are free there; free some, or name another place with --pool PATH,size=SIZE",
			d.Path, Size(free))
	}
	d.Size = Size(size)
	return nil
}

// DefaultCoherence is none for a device, which several hosts may map: whether their caches agree is not known here, and
// to believe so wrongly is to read wrong bytes. A file's pages are this host's own, and its caches agree.
func DefaultCoherence(path string) string {
	info, err := os.Stat(path)
	if err == nil && info.Mode()&os.ModeDevice != 0 || strings.HasPrefix(filepath.Clean(path), "/dev/dax") {
		return "none"
	}
	return "hardware"
}

// freeSpace is the number of bytes that an ordinary user may still write below dir or, if that does not exist yet,
// below its nearest parent that does.
func freeSpace(dir string) (uint64, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(dir, &st)
		if err == nil {
			return st.Bavail * uint64(st.Bsize), nil //nolint:gosec // a block size is positive
		}
		parent := filepath.Dir(dir)
		if !errors.Is(err, os.ErrNotExist) || parent == dir {
			return 0, fmt.Errorf("free space of %s: %w", dir, err)
		}
		dir = parent
	}
}
