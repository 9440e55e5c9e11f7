package meta

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"larder/protocol"
)

// Watermarks say from how much use of a device on, in percent, its cold end is copied to a slower tier.
type Watermarks struct {
	All uint64            // of devices that are not named
	Of  map[string]uint64 // of those of a tier, or of one: #3
}

// maxWatermarks bounds those that a pool's settings name.
const maxWatermarks = 256

// ParseWatermarks reads a percentage for all devices, and others for tiers and devices: 70%,dram=60%,#3=50%.
func ParseWatermarks(text string) (Watermarks, error) {
	w := Watermarks{Of: map[string]uint64{}}
	all := false
	for part := range strings.SplitSeq(text, ",") {
		name, value, named := strings.Cut(strings.TrimSpace(part), "=")
		if !named {
			name, value = "", name
		}
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		percent, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(value, "%")), 10, 64)
		if err != nil || percent > 100 {
			return w, fmt.Errorf("%.40q is no percentage: write one for all devices, and others for tiers and devices, as in "+
				"70%%,dram=60%%,#3=50%%", value)
		}
		_, twice := w.Of[name]
		if twice || !named && all {
			return w, fmt.Errorf("%.40q is given twice", cmp.Or(name, "the percentage of all devices"))
		}
		if !named {
			w.All, all = percent, true
			continue
		}
		if err := watermarkName(name); err != nil {
			return w, err
		}
		w.Of[name] = percent
	}
	if !all {
		return w, fmt.Errorf("%.40q has no percentage for the other devices: begin with it, as in 70%%,%.40s", text, text)
	}
	if len(w.Of) > maxWatermarks {
		return w, fmt.Errorf("at most %d tiers and devices", maxWatermarks)
	}
	return w, nil
}

// watermarkName refuses what is no tier from which anything is copied to a slower one, and no device.
func watermarkName(name string) error {
	if name == protocol.Tiers[len(protocol.Tiers)-1] {
		return fmt.Errorf("%s is the slowest tier: nothing is copied from there", name)
	}
	id, device := strings.CutPrefix(name, "#")
	n, err := strconv.ParseUint(id, 10, 32)
	if device && err == nil && n > 0 && id == strconv.FormatUint(n, 10) || !device && protocol.TierRank(name) >= 0 {
		return nil
	}
	return fmt.Errorf("%.40q is neither a tier (cxl, dram) nor a device (#3)", name)
}

// For returns the watermark of a device: its own, or else its tier's.
func (w *Watermarks) For(tier string, id DeviceID) uint64 {
	if len(w.Of) == 0 {
		return w.All
	}
	for _, name := range [...]string{"#" + strconv.FormatUint(uint64(id), 10), tier} {
		if percent, ok := w.Of[name]; ok {
			return percent
		}
	}
	return w.All
}

// String gives the form that ParseWatermarks reads, always the same for the same: tiers first, then devices.
func (w *Watermarks) String() string {
	text := strconv.FormatUint(w.All, 10) + "%"
	if named := w.Named(); named != "" {
		text += "," + named
	}
	return text
}

// Named is String without the percentage of all devices, for Settings.TierLows.
func (w *Watermarks) Named() string {
	parts := make([]string, 0, len(w.Of))
	for _, name := range slices.SortedFunc(maps.Keys(w.Of), func(a, b string) int { return cmp.Compare(nameOrder(a), nameOrder(b)) }) {
		parts = append(parts, name+"="+strconv.FormatUint(w.Of[name], 10)+"%")
	}
	return strings.Join(parts, ",")
}

// nameOrder is where a name of a tier or device comes in a list: tiers by speed, then devices by number.
func nameOrder(name string) uint64 {
	id, device := strings.CutPrefix(name, "#")
	if !device {
		return uint64(protocol.TierRank(name)) //nolint:gosec // it is a tier's
	}
	n, _ := strconv.ParseUint(id, 10, 32)
	return uint64(len(protocol.Tiers)) + n
}

// HasWatermarks reports whether those that the settings say can be read.
func (s *Settings) HasWatermarks() bool {
	_, err := s.Watermarks()
	return err == nil
}

// Watermarks returns those that the settings say.
func (s *Settings) Watermarks() (Watermarks, error) {
	text := strconv.FormatUint(s.TierLow, 10) + "%"
	if s.TierLows != "" {
		text += "," + s.TierLows
	}
	return ParseWatermarks(text)
}
