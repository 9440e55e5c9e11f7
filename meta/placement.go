package meta

import (
	"strconv"

	"larder/protocol"
)

// mayUse reports whether the instance can be given a region of a device at all. Devices that nodes serve are for clients
// that can write by transfer, those of the slowest tier for requests that name it, or the device.
func (p *planner) mayUse(d *device) bool {
	if p.req.Promote && d.slow() {
		return false
	}
	if p.req.Device != 0 {
		return uint64(d.id) == p.req.Device && d.mode == DeviceServing && !d.draining
	}
	return d.mode == DeviceServing && !d.draining &&
		(d.Home == "" || p.s.features&protocol.FeatureCopies != 0) &&
		(!d.slow() || p.req.Tier == d.Tier || d.Home == "")
}

// rate says how well a device suits a request, 0 best: it is not to be avoided, of the tier that is preferred, and as near
// as can be, in this order.
func (p *planner) rate(d *device) int {
	rating := indexPlace(p.req.Near, d)
	if p.req.Tier != "" && d.Tier != p.req.Tier {
		rating += protocol.MaxPlaces + 1
	}
	if indexPlace(p.req.Avoid, d) < len(p.req.Avoid) {
		rating += 2 * (protocol.MaxPlaces + 1)
	}
	return rating
}

// indexPlace is which of some names a device answers to first: its node, its NUMA node (node/0), or itself (#3);
// len(names) if none.
func indexPlace(names []string, d *device) int {
	for i, name := range names {
		switch {
		case name == d.Node, name == "#"+strconv.FormatUint(uint64(d.id), 10),
			d.NUMA != 0 && name == d.Node+"/"+strconv.FormatUint(d.NUMA-1, 10):
			return i
		}
	}
	return len(names)
}
