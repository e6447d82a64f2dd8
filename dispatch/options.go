// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"log/slog"
	"math"
	"time"

	"instar/dispatch/connid"
)

// DefaultRoot is the folder below which groups are pinned: a folder on a bpffs.
const DefaultRoot = "/sys/fs/bpf/instar"

// Defaults and limits of the options that size a group. They count when the
// group is created; who joins later takes the sizes that the group has.
const (
	DefaultMaxGenerations = 16
	DefaultWorkers        = 64
	DefaultFlowEntries    = 1 << 16

	LimitGenerations = 256
	LimitWorkers     = 256
	LimitFlowEntries = 1 << 24

	// DefaultFlowTimeout is what RFC 4787 section 4.3 recommends for UDP mappings.
	DefaultFlowTimeout = 5 * time.Minute
	LimitFlowTimeout   = math.MaxUint16 * time.Second
)

// Options name a group and say how to make it. The zero value of every field
// but Address works.
type Options struct {
	// Network is "udp", "udp4", "udp6", "tcp", "tcp4" or "tcp6", as in package net with
	// one difference: "udp6" and "tcp6" are always IPv6 only, "udp" on [::] is dual stack,
	// and "udp" on an IPv4 address is "udp4". Default "udp", with SteeringTCP "tcp".
	Network string

	// Address is "IP:port" with a literal IP address and a port from 1 to
	// 65535. ":port" is the dual-stack wildcard [::]:port (0.0.0.0 for "udp4").
	// Port 0 is refused: a group is found by its port.
	Address string

	// Device binds the sockets to a network device (SO_BINDTODEVICE). The same
	// address on another device, or on none, is another group. Default none.
	Device string

	// Service is the operator's name of the program that owns the group, at
	// most 63 bytes. Only the same service may join it. Default: the base name
	// of the executable.
	Service string

	// Steering selects the data plane. Default SteeringQUIC, which is of UDP as all
	// others are but SteeringTCP, the default and the only one of TCP.
	Steering Steering

	// MaxGenerations is the most generations that may hold sockets at the same
	// time, staged, active and draining together; 2 to 256. Join refuses the
	// next one before it binds anything. Default 16.
	MaxGenerations int

	// Workers is the most sockets of one generation, 1 to 256. Default 64.
	Workers int

	// FlowEntries is the size of the table of remembered flows (with QUIC:
	// handshakes under way), 64 to 16,777,216. When it is full the least
	// recently used flow is forgotten; the kernel begins with that a little earlier,
	// so leave an eighth of room. An entry takes about 100 bytes of kernel memory.
	// Default 65,536. SteeringStateless and SteeringTCP have no such table.
	FlowEntries int

	// FlowTimeout is how long a flow may be silent until SteeringFlow forgets it, or how
	// long SteeringWireGuard knows an index, 1 s to 65,535 s, counted in seconds. Default
	// 5 min. It counts when the group is created, as FlowLearning does.
	FlowTimeout time.Duration

	// FlowLearning is when SteeringFlow remembers a flow. It counts when the group is created.
	// Default LearnReceived.
	FlowLearning Learning

	// Dissector is the function of SteeringCustom. It counts when the group is created,
	// and for Group.UpgradeProgram. Default none, which opens a group that exists.
	Dissector *Dissector

	// LoadBalancer puts a QUIC-LB identifier in front of ours, so that an outer
	// layer-4 balancer finds the host. All generations of a group need the same
	// prefix length. Default none.
	LoadBalancer *connid.LoadBalancer

	// Root is the folder, on a bpffs, below which groups are pinned.
	// Default DefaultRoot.
	Root string

	// Files replaces the folder: the group has no pins and needs no bpffs. Its maps,
	// its program and a file for the lock go from process to process as descriptors,
	// under names that begin with the address. Open makes the group when nothing was
	// passed; it lives as long as a process, or a service manager's store, holds them.
	// Tools do not see it, Root does not count. It needs /proc. Default: pins.
	Files Files

	// AllowOverlap lets a group open although another bind of the same port
	// could get some of its packets. The kernel gives a packet to a socket of its
	// very address, else to an IPv4 wildcard, else to an IPv6 one; where both are
	// the same and only the device or v6only differs, the order of binding
	// decides, and each new generation can turn it round. Default false: Open
	// refuses.
	AllowOverlap bool

	// ReceiveBuffer is SO_RCVBUF of each socket in bytes, as the kernel counts
	// (it doubles the value). 0 keeps the kernel's default. With CAP_NET_ADMIN
	// the limit net.core.rmem_max does not apply. With TCP it is refused: the kernel
	// would no longer fit the buffers of the connections to their paths.
	ReceiveBuffer int

	// Build labels the generations that join through this Group in listings, at
	// most 31 bytes. Default: the VCS revision in the build information, or the
	// executable's size and modification time.
	Build string

	// Logger receives what an operator should know: repairs, overlaps, drains.
	// Default: nothing is logged.
	Logger *slog.Logger
}

// Owner is the user to whom Prepare gives a group.
type Owner struct {
	UID int
	GID int
}
