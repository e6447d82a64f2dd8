// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"

	"instar/internal/sockdiag"
)

// Overlap is how a socket's address relates to a group's, when both can get the same
// packets.
type Overlap string

const (
	// OverlapSame is the same address and device: the two share it, or one of them cannot
	// bind.
	OverlapSame Overlap = "same"
	// OverlapNarrower takes packets from the group: it is more specific.
	OverlapNarrower Overlap = "narrower"
	// OverlapWider loses packets to the group.
	OverlapWider Overlap = "wider"
	// OverlapContested goes by the order of binding.
	OverlapContested Overlap = "contested"
)

var overlaps = map[relation]Overlap{
	same: OverlapSame, narrower: OverlapNarrower, wider: OverlapWider, contested: OverlapContested,
}

// Socket is a socket of the kernel at an address, or at one that overlaps with it.
type Socket struct {
	// Network is "udp", "udp4", "udp6" or the like of "tcp", as in Options.
	Network string
	Address string
	// Device is its index, 0 when the socket is bound to none.
	Device int
	// UID is the user that made it.
	UID uint32
	// Inode names it in /proc/PID/fd, Cookie is its SO_COOKIE.
	Inode  uint32
	Cookie uint64
	// Registered says that the group has it.
	Registered bool
	Overlap    Overlap
}

// Sockets lists the sockets at the group's address and those that overlap with it, of all
// processes, registered or not. Connected ones are left out: they get no packet of
// others.
//
// Errors: ErrState when the calling thread is in another network namespace than the group.
func (g *Group) Sockets() ([]Socket, error) {
	namespace, err := namespaceName()
	if err == nil && g.namespace != "" && namespace != g.namespace {
		err = fmt.Errorf("%w: it is in network namespace %s, and this process in %s", ErrState, g.namespace, namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("list sockets of %s: %w", g.key, err)
	}
	release, err := g.use()
	if err != nil {
		return nil, fmt.Errorf("list sockets of %s: %w", g.key, err)
	}
	defer release()
	return g.socketsNear()
}

// SocketsAt lists the sockets at an address that no group has, as Group.Sockets does. Only
// Network, Address and Device of the options count. The network is the one that a group
// there would have: "udp4" where the options say "udp" and an IPv4 address.
//
// Errors: ErrOptions when it is no address.
func SocketsAt(o Options) (network string, sockets []Socket, err error) {
	k, err := parseKey(o.Network, o.Address, o.Device)
	if err != nil {
		return "", nil, err
	}
	sockets, err = (&Group{key: k}).socketsNear()
	return k.network, sockets, err
}

func (g *Group) socketsNear() ([]Socket, error) {
	all, err := g.key.sockets()
	if err != nil {
		return nil, fmt.Errorf("list sockets of %s: %w", g.key, err)
	}
	device, err := g.key.deviceIndex()
	if err != nil {
		return nil, fmt.Errorf("list sockets of %s: %w", g.key, err)
	}
	ours := g.owners()
	var list []Socket
	for _, s := range all {
		relation := g.key.relate(s, device)
		if s.Peer.IsValid() || relation == apart {
			continue
		}
		_, registered := ours[s.Cookie]
		list = append(list, g.key.socket(s, relation, registered))
	}
	return list, nil
}

func (k key) socket(s sockdiag.Socket, r relation, ours bool) Socket {
	return Socket{
		Network: k.protocol() + familyOf(s), Address: s.Local.String(), Device: s.Device,
		UID: s.UID, Inode: s.Inode, Cookie: s.Cookie, Registered: ours, Overlap: overlaps[r],
	}
}
