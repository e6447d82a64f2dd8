// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"instar/dispatch"
)

const namesHelp = `GROUP names a group in one of these forms:

  NAME         as "instar groups" lists it, such as udp4-127.0.0.1-443;
               one of the caller's own network namespace wins over others
  NETNS/NAME   the same in the network namespace of that folder
  ADDRESS      such as 127.0.0.1:443, [::1]:443 or :443, where it is
               unambiguous; a protocol in front and a device behind narrow it:
               'udp 127.0.0.1:443', 'udp [::]:443 eth0'
  PATH         the group's pin folder, absolute

A generation N is the number that "instar show GROUP" lists.
`

// shortName is what to type for a group: its name where it is the caller's
// namespace, and the folder of the namespace in front of it where it is not.
func shortName(e dispatch.Entry) string {
	if e.Here {
		return e.Name
	}
	return e.Netns + "/" + e.Name
}

// resolve finds the group that the command line names.
func (a *app) resolve(name string) (dispatch.Entry, error) {
	entries, err := dispatch.List(a.root)
	// A path may lie below another root.
	if err != nil && (!filepath.IsAbs(name) || !errors.Is(err, dispatch.ErrNoBPFFS)) {
		return dispatch.Entry{}, err
	}
	var found []dispatch.Entry
	for _, match := range []func(dispatch.Entry) bool{
		func(e dispatch.Entry) bool { return filepath.IsAbs(name) && e.Path == filepath.Clean(name) },
		func(e dispatch.Entry) bool { return e.Here && named(e, name) },
		func(e dispatch.Entry) bool { return named(e, name) },
		addressMatch(name),
	} {
		for _, e := range entries {
			if match(e) {
				found = append(found, e)
			}
		}
		if len(found) > 0 {
			break
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		if filepath.IsAbs(name) {
			return dispatch.Entry{Path: filepath.Clean(name), Name: filepath.Base(name),
				Netns: filepath.Base(filepath.Dir(filepath.Clean(name)))}, nil
		}
		return dispatch.Entry{}, notFoundf("group %q: not found below %s; \"instar groups\" lists what there is", name, a.root)
	}
	// An address that means exactly one group of this namespace is clear enough.
	var here []dispatch.Entry
	names := make([]string, 0, len(found))
	for _, e := range found {
		if e.Here {
			here = append(here, e)
		}
		names = append(names, shortName(e))
	}
	if len(here) == 1 {
		return here[0], nil
	}
	// And an address without a device means the group without one.
	if i := slices.IndexFunc(here, func(e dispatch.Entry) bool { return e.Snapshot != nil && e.Snapshot.Device == "" }); i >= 0 &&
		sameButDevice(here) {
		return here[i], nil
	}
	return dispatch.Entry{}, usagef("group %q: ambiguous, it can be any of %s", name, strings.Join(names, ", "))
}

// sameButDevice reports whether groups differ in nothing but their device.
func sameButDevice(groups []dispatch.Entry) bool {
	for _, e := range groups {
		if e.Snapshot == nil || groups[0].Snapshot == nil ||
			e.Snapshot.Address != groups[0].Snapshot.Address || e.Snapshot.Network != groups[0].Snapshot.Network {
			return false
		}
	}
	return true
}

// named matches a group by its name or its folder's, alone or behind that of
// its namespace.
func named(e dispatch.Entry, name string) bool {
	name = strings.TrimPrefix(name, e.Netns+"/")
	return name == e.Name || name == filepath.Base(e.Path)
}

// addressMatch matches groups by "[NETWORK ]ADDRESS[ DEVICE]".
func addressMatch(name string) func(dispatch.Entry) bool {
	none := func(dispatch.Entry) bool { return false }
	fields := strings.Fields(name)
	network, device, anyDevice := "", "", true
	if len(fields) > 0 && !strings.Contains(fields[0], ":") {
		network, fields = fields[0], fields[1:]
	}
	if len(fields) == 2 {
		device, anyDevice, fields = fields[1], false, fields[:1]
	}
	if len(fields) != 1 {
		return none
	}
	want, wildcard, ok := parseAddress(fields[0])
	if !ok {
		return none
	}
	return func(e dispatch.Entry) bool {
		if e.Snapshot == nil || !anyDevice && e.Snapshot.Device != device {
			return false
		}
		// "udp" and "tcp" are those of all families.
		if e.Snapshot.Network != network && (len(network) > len("udp") || !strings.HasPrefix(e.Snapshot.Network, network)) {
			return false
		}
		have, _, ok := parseAddress(e.Snapshot.Address)
		if !ok || have.Port() != want.Port() {
			return false
		}
		return have == want || wildcard && have.Addr().IsUnspecified()
	}
}

// parseAddress reads "IP:port" or ":port"; wildcard says that it was the latter.
func parseAddress(s string) (addr netip.AddrPort, wildcard, ok bool) {
	if port, found := strings.CutPrefix(s, ":"); found {
		n, err := strconv.ParseUint(port, 10, 16)
		return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(n)), true, err == nil
	}
	addr, err := netip.ParseAddrPort(s)
	return addr, false, err == nil
}

// open opens the group that the command line names and reads it.
func (a *app) open(name string) (*dispatch.Group, dispatch.Entry, dispatch.Snapshot, error) {
	e, err := a.resolve(name)
	if err != nil {
		return nil, e, dispatch.Snapshot{}, err
	}
	g, err := dispatch.OpenPath(e.Path)
	if err != nil {
		return nil, e, dispatch.Snapshot{}, err
	}
	s, err := g.Snapshot()
	if err != nil {
		return nil, e, s, errors.Join(err, g.Close())
	}
	return g, e, s, nil
}

// parseNumber reads a generation's number.
func parseNumber(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 0 {
		return 0, usagef("generation %q: not a number from 1 on, as \"instar show GROUP\" lists them", s)
	}
	return uint32(n), nil
}

// find looks for a generation that is not gone. When it is not there, newest is
// the highest number that is.
func find(s dispatch.Snapshot, number uint32) (g dispatch.GenerationInfo, newest uint32, ok bool) {
	for _, g := range s.Generations {
		if g.Number == number {
			return g, number, true
		}
		newest = max(newest, g.Number)
	}
	return dispatch.GenerationInfo{}, newest, false
}
