// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/safchain/ethtool"

	"instar/dispatch"
	"instar/internal/capset"
)

// wantReceiveBuffer is what QUIC servers ask for (quic-go, and others after it).
const wantReceiveBuffer = 7 << 20

func checkReceiveBuffers(*exam) []Finding {
	n, err := setting("net/core/rmem_max")
	switch {
	case err != nil:
		return unreadable(err)
	case n < wantReceiveBuffer:
		return one(Warning, fmt.Sprintf("sysctl -w net.core.rmem_max=%d", wantReceiveBuffer+1<<20),
			"net.core.rmem_max is %d bytes, and QUIC servers ask for %d: a burst can overflow the queue of a socket", n, wantReceiveBuffer)
	default:
		return one(OK, "", "net.core.rmem_max is %d bytes", n)
	}
}

// wantAcceptQueue is the default since Linux 5.4.
const wantAcceptQueue = 4096

func checkAcceptQueues(*exam) []Finding {
	n, err := setting("net/core/somaxconn")
	switch {
	case err != nil:
		return unreadable(err)
	case n < wantAcceptQueue:
		return one(Warning, fmt.Sprintf("sysctl -w net.core.somaxconn=%d", wantAcceptQueue),
			"net.core.somaxconn is %d: connections that wait while a listener is handed over, or a worker starts, overflow its accept queue", n)
	default:
		return one(OK, "", "net.core.somaxconn is %d", n)
	}
}

func checkMigrate(x *exam) []Finding {
	n, err := setting("net/ipv4/tcp_migrate_req")
	if err != nil {
		return one(Unknown, "", "this kernel moves no connections from a listener that closes: %v", err)
	}
	if n == 0 {
		for _, g := range x.groups {
			if g.path != "" || !strings.HasPrefix(g.network(), "tcp") {
				continue
			}
			same := 0
			for _, s := range g.sockets {
				if s.Overlap == dispatch.OverlapSame {
					same++
				}
			}
			if same > 1 {
				return []Finding{g.finding(Warning, "use steering tcp, hand the listener over (package handover), or: sysctl -w net.ipv4.tcp_migrate_req=1",
					"%d listeners share %s without a group and net.ipv4.tcp_migrate_req is 0: connections that wait at one are reset when it closes", same, g.name)}
			}
		}
	}
	return one(OK, "", "groups with steering tcp need no net.ipv4.tcp_migrate_req (it is %d)", n)
}

func checkPorts(x *exam) []Finding {
	start, err := setting("net/ipv4/ip_unprivileged_port_start")
	if err != nil {
		return unreadable(err)
	}
	var found []Finding
	for _, g := range x.groups {
		if g.snapshot == nil {
			continue
		}
		addr, err := netip.ParseAddrPort(g.snapshot.Address)
		if err != nil || int(addr.Port()) >= start {
			continue
		}
		cure := fmt.Sprintf("add it (a unit's AmbientCapabilities=CAP_NET_BIND_SERVICE), or: sysctl -w net.ipv4.ip_unprivileged_port_start=%d", addr.Port())
		switch {
		case g.path == "" && !x.caps.Allows(capset.NetBindService):
			found = append(found, g.finding(Problem, cure, "port %d is below net.ipv4.ip_unprivileged_port_start (%d), and this process lacks CAP_NET_BIND_SERVICE: it cannot bind",
				addr.Port(), start))
		case g.path != "" && g.uid != 0:
			found = append(found, g.finding(Warning, cure, "port %d is below net.ipv4.ip_unprivileged_port_start (%d): the group's owner, uid %d, binds it with CAP_NET_BIND_SERVICE alone",
				addr.Port(), start, g.uid))
		}
	}
	return orOK(found, "ports from %d on need no capability", start)
}

func checkConntrack(x *exam) []Finding {
	count, err := setting("net/netfilter/nf_conntrack_count")
	if errors.Is(err, os.ErrNotExist) {
		return one(OK, "", "nf_conntrack is not loaded")
	}
	most := 0
	if err == nil {
		most, err = setting("net/netfilter/nf_conntrack_max")
	}
	var ports []string // as nft(8) writes them
	for _, g := range x.groups {
		if g.snapshot == nil {
			continue
		}
		if addr, err := netip.ParseAddrPort(g.snapshot.Address); err == nil {
			ports = append(ports, fmt.Sprintf("%s dport %d", protocol(g.network()), addr.Port()))
		}
	}
	port := "udp dport PORT"
	if len(ports) == 1 {
		port = ports[0]
	}
	cure := fmt.Sprintf("take the servers' ports out of it, in a prerouting chain of priority raw: nft add rule ... %s notrack", port)
	switch {
	case err != nil:
		return unreadable(err)
	case count == 0:
		return one(OK, "", "nf_conntrack tracks no connection in this network namespace")
	case most > 0 && count >= most/10*9:
		return one(Problem, cure+"; or raise net.netfilter.nf_conntrack_max", "nf_conntrack tracks %d connections and has room for %d: when it is full, new flows are dropped before any socket sees them", count, most)
	default:
		return one(Warning, cure, "nf_conntrack is in front of the sockets and tracks %d connections (room for %d): each flow takes an entry, and costs more than its steering", count, most)
	}
}

// joinsPackets are features of a device that join packets of one sender before a socket is
// chosen (udp_gro_receive in net/ipv4/udp_offload.c).
var joinsPackets = []string{"rx-gro-list", "rx-udp-gro-forwarding"}

// devicesThatJoin lists the devices with such a feature.
func devicesThatJoin() (list []string, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("read features of devices: %w", err)
	}
	defer e.Close()
	devices, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		features, err := e.Features(d.Name)
		if err != nil {
			continue // it is gone, or has none
		}
		for _, f := range joinsPackets {
			if features[f] {
				list = append(list, d.Name+" "+f)
			}
		}
	}
	return list, nil
}
