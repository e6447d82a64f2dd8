// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/sockdiag"
)

// settle is how long a socket that stands in the way may take to go, where its process
// may just be closing it or dying.
var settle = 3 * time.Second

// rival is a socket that stands in the way.
type rival struct {
	cookie uint64
	// leaving says that it may be gone in a moment.
	leaving bool
	reason  error
}

// checkAddress looks at the sockets that have the group's port, and refuses those
// that would take packets from the group, keep it from binding, or join it behind
// the control plane's back. It is called before every bind, without the group's lock,
// since it may wait.
func (g *Group) checkAddress() error {
	var first map[uint64]bool
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		rivals, err := g.rivals()
		if err != nil {
			return err
		}
		// Those that came after the first look are other generations on their way in
		// or out.
		var stays error
		for _, r := range rivals {
			if !r.leaving {
				return r.reason
			}
			if stays == nil && (first == nil || first[r.cookie]) {
				stays = r.reason
			}
		}
		if stays == nil || time.Since(start) > settle {
			return stays
		}
		if first == nil {
			first = make(map[uint64]bool)
			for _, r := range rivals {
				first[r.cookie] = true
			}
		}
	}
}

// rivals finds the sockets that stand in the way.
func (g *Group) rivals() ([]rival, error) {
	sockets, err := g.key.sockets()
	if err != nil {
		// A kernel without its module for that, or a seccomp filter. Binding tells the worst of it.
		g.log.Warn("cannot see who else is at the address", "group", g.key.String(), "err", err)
		return nil, nil
	}
	device, err := g.key.deviceIndex()
	if err != nil {
		return nil, err
	}
	ours := g.owners()
	strangers := slices.DeleteFunc(sockets, func(s sockdiag.Socket) bool {
		_, registered := ours[s.Cookie]
		return s.Peer.IsValid() || registered || g.key.relate(s, device) == apart
	})
	inodes := make([]uint32, len(strangers))
	for i, s := range strangers {
		inodes[i] = s.Inode
	}
	owners := sockdiag.Owners(inodes...)
	var rivals []rival
	for _, s := range strangers {
		relation := g.key.relate(s, device)
		holders := owners[s.Inode]
		if relation == same && s.UID == uint32(os.Geteuid()) && g.left(holders) {
			continue
		}
		if relation != same && g.allowOverlap {
			g.log.Warn("an overlapping socket", "group", g.key.String(), "reason", g.key.reason(relation, s, holders))
			continue
		}
		r := rival{
			cookie: s.Cookie,
			// Of a process that is dying, or of one that left the group and whose slot
			// another one has.
			leaving: len(holders) == 0 || relation == same && g.hadGenerations(),
			reason:  fmt.Errorf("%w: %s", ErrOccupied, g.key.reason(relation, s, holders)),
		}
		if relation == same && s.UID == uint32(os.Geteuid()) {
			r.reason = fmt.Errorf("%w; stop that process, or start it through Instar as service %q so that it joins", r.reason, g.service)
		}
		rivals = append(rivals, r)
	}
	return rivals, nil
}

// sockets lists those that have the group's port.
func (k key) sockets() ([]sockdiag.Socket, error) {
	if k.protocol() == tcp {
		return sockdiag.TCPListeners(k.addr.Port())
	}
	return sockdiag.UDP(k.addr.Port())
}

// deviceIndex is the number of the group's device, 0 when it has none.
func (k key) deviceIndex() (int, error) {
	if k.device == "" {
		return 0, nil
	}
	i, err := net.InterfaceByName(k.device)
	if err == nil {
		return i.Index, nil
	}
	if _, ok := errors.AsType[unix.Errno](err); !ok {
		err = unix.ENODEV // package net has no error of its own to compare with
	}
	return 0, fmt.Errorf("find device %s: %w; create it first, or correct the name", k.device, err)
}

// reason says why a socket is in the way, and what to do about it.
func (k key) reason(r relation, s sockdiag.Socket, holders []sockdiag.Process) string {
	who := k.describe(s, holders)
	switch r {
	case narrower:
		return fmt.Sprintf("%s is more specific and takes its packets from this group; %s", who, k.resolve(s))
	case wider:
		return fmt.Sprintf("%s is less specific; this group would take packets from it; %s", who, k.resolve(s))
	case contested:
		return fmt.Sprintf("%s gets packets of this group, or this group gets its packets, by the order of binding; %s", who, k.resolve(s))
	}
	if uid := os.Geteuid(); s.UID != uint32(uid) {
		return fmt.Sprintf("%s is held by uid %d and this process has effective uid %d; the kernel lets only one user share "+
			"an address: run both as the same user, or stop the other one", who, s.UID, uid)
	}
	return who + " is not registered with this group"
}

type relation int

const (
	apart relation = iota
	// same address and device: a member of the reuseport group, or a rival.
	same
	// narrower sockets take packets from us, wider ones lose packets to us.
	narrower
	wider
	// contested packets go to the one that was bound first, or last.
	contested
)

// relate compares a socket's address with the group's. The kernel looks for a socket
// of the packet's address, then for a wildcard one, and takes the first reuseport
// group that it finds (udp4_lib_lookup2 in net/ipv4/udp.c, udp6_lib_lookup2 in
// net/ipv6/udp.c): IPv4 sockets come first, the latest of them, then IPv6 ones, the
// earliest of them. A device adds nothing. TCP listeners are found in the same way
// (inet_lhash2_lookup in net/ipv4/inet_hashtables.c).
func (k key) relate(s sockdiag.Socket, device int) relation {
	if s.Device == noDevice {
		return apart // it is being closed, see closeSockets
	}
	v4 := s.Family == unix.AF_INET
	any4 := v4 || !s.V6Only && s.Local.Addr().IsUnspecified() || s.Local.Addr().Is4In6()
	any6 := !v4 && !s.Local.Addr().Is4In6()
	our4 := k.family() != "6"
	our6 := k.family() != "4"
	if (!any4 || !our4) && (!any6 || !our6) {
		return apart
	}
	if device != 0 && s.Device != 0 && device != s.Device {
		return apart
	}
	theirs, mine := s.Local.Addr().Unmap(), k.addr.Addr()
	if !theirs.IsUnspecified() && !mine.IsUnspecified() && theirs.WithZone("") != mine.WithZone("") {
		return apart
	}
	family := familyOf(s)
	switch {
	case family == k.family() && theirs.WithZone("") == mine.WithZone("") && s.Device == device:
		return same
	case theirs.IsUnspecified() != mine.IsUnspecified():
		if mine.IsUnspecified() {
			return narrower
		}
		return wider
	case family == "4" && k.family() != "4":
		return narrower
	case family != "4" && k.family() == "4":
		return wider
	}
	return contested
}

// familyOf is as key.family.
func familyOf(s sockdiag.Socket) string {
	switch {
	case s.Family == unix.AF_INET, s.Local.Addr().Is4In6():
		return "4"
	case s.V6Only, !s.Local.Addr().IsUnspecified():
		return "6"
	default:
		return ""
	}
}

// resolve says what to do about a socket that overlaps.
func (k key) resolve(s sockdiag.Socket) string {
	switch theirs := familyOf(s); {
	case theirs != k.family() && theirs != "4" && k.family() != "4" && k.addr.Addr() == s.Local.Addr():
		return fmt.Sprintf("the two differ in v6only: stop that process, set Network to %q (dual stack) or %q (IPv6 only) in both, or set AllowOverlap",
			k.protocol(), k.protocol()+"6")
	case theirs == k.family() && k.addr.Addr().Unmap() == s.Local.Addr().Unmap():
		return "the two differ in the device: stop that process, bind both to devices, or set AllowOverlap"
	}
	return "stop that process, bind the same address, or set AllowOverlap"
}

// describe names a socket and who holds it.
func (k key) describe(s sockdiag.Socket, holders []sockdiag.Process) string {
	var b strings.Builder
	fmt.Fprintf(&b, "a socket on %s%s %s", k.protocol(), familyOf(s), s.Local)
	if s.Device != 0 {
		if i, err := net.InterfaceByIndex(s.Device); err == nil {
			fmt.Fprintf(&b, " on device %s", i.Name)
		} else {
			fmt.Fprintf(&b, " on device %d", s.Device)
		}
	}
	if len(holders) == 0 {
		fmt.Fprintf(&b, " (of uid %d; its process cannot be seen from here)", s.UID)
		return b.String()
	}
	names := make([]string, len(holders))
	for i, p := range holders {
		names[i] = p.String()
	}
	fmt.Fprintf(&b, " (%s)", strings.Join(names, ", "))
	return b.String()
}

// left reports whether an unregistered socket may belong to a generation that has left
// the map and is about to close it.
func (g *Group) left(holders []sockdiag.Process) bool {
	if g.pins == nil {
		return false
	}
	return slices.ContainsFunc(g.table.Info[:], func(info bpf.Info) bool {
		if len(holders) == 0 {
			// Somebody whom we cannot see: one of another PID namespace, or one that
			// changed its user and keeps others from looking at its descriptors.
			return info.Number != 0 && (info.PidNamespace != pidNamespace() || lives(&info) && hidden(info.Pid))
		}
		return slices.ContainsFunc(holders, func(p sockdiag.Process) bool {
			return info.Pid == uint32(p.PID) && lives(&info)
		})
	})
}

// hadGenerations reports whether anybody ever joined the group.
func (g *Group) hadGenerations() bool { return g.pins != nil && g.table.NextNumber > 1 }

// explainBind says why the kernel refused a bind that the preflight let through.
// Who calls has named the group, and package net would do so once more.
func (g *Group) explainBind(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		sockets, e := g.key.sockets()
		for _, s := range sockets {
			return fmt.Errorf("%w: %w: %s; it may lack SO_REUSEPORT or belong to another user (uid %d, we are %d)",
				ErrOccupied, err, g.key.describe(s, sockdiag.Owners(s.Inode)[s.Inode]), s.UID, os.Geteuid())
		}
		return fmt.Errorf("%w: %w", ErrOccupied, errors.Join(err, e))
	case errors.Is(err, unix.EACCES) && g.key.addr.Port() < 1024:
		return fmt.Errorf("%w: %w; a port below net.ipv4.ip_unprivileged_port_start needs CAP_NET_BIND_SERVICE",
			ErrPermission, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%w; no device of this network namespace has that address", err)
	}
	return err
}
