// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch/connid"
	"instar/internal/bpffs"
	"instar/internal/build"
)

// key names a group within a network namespace.
type key struct {
	// network is "udp4", "udp6" (IPv6 only) or "udp" (dual stack, on [::]), or the like of
	// "tcp".
	network string
	addr    netip.AddrPort
	device  string
}

func parseKey(network, address, device string) (key, error) {
	bad := func(format string, args ...any) (key, error) {
		return key{}, fmt.Errorf("%w: address %q: %s", ErrOptions, address, fmt.Sprintf(format, args...))
	}
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return bad("want IP:port, such as 192.0.2.1:443 or [::]:443")
	}
	port, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return bad("port %q is not a number from 1 to 65535", service)
	}
	if port == 0 {
		return bad("port 0 would be another port in each process; name one")
	}
	if network == "" {
		network = udp
	}
	protocol, family, ok := splitNetwork(network)
	if !ok {
		return key{}, fmt.Errorf("%w: network %q; want udp, udp4, udp6, tcp, tcp4 or tcp6", ErrOptions, network)
	}
	var ip netip.Addr
	switch {
	case host != "":
		if ip, err = netip.ParseAddr(host); err != nil {
			return bad("%q is not a literal IP address", host)
		}
		ip = ip.Unmap()
	case family == "4":
		ip = netip.IPv4Unspecified()
	default:
		ip = netip.IPv6Unspecified()
	}
	if ip.IsMulticast() {
		return bad("a multicast address reaches every socket; it cannot be steered")
	}
	switch {
	case family == "" && ip.Is4():
		family = "4"
	case family == "" && !ip.IsUnspecified():
		family = "6"
	case family == "", family == "4" && ip.Is4(), family == "6" && ip.Is6():
	default:
		return bad("is not of network %q", network)
	}
	if len(device) >= unix.IFNAMSIZ || strings.ContainsAny(device, "/ \t\n") {
		return key{}, fmt.Errorf("%w: device %q is no name of a network device", ErrOptions, device)
	}
	return key{protocol + family, netip.AddrPortFrom(ip, uint16(port)), device}, nil
}

const (
	udp = "udp"
	tcp = "tcp"
)

// splitNetwork takes a network apart, such as "udp4": the family is "4", "6" or "", which
// is both.
func splitNetwork(network string) (protocol, family string, ok bool) {
	for _, protocol := range []string{udp, tcp} {
		if family, ok := strings.CutPrefix(network, protocol); ok && (family == "" || family == "4" || family == "6") {
			return protocol, family, true
		}
	}
	return "", "", false
}

func (k key) protocol() string { p, _, _ := splitNetwork(k.network); return p }

// family is "4", "6" (IPv6 only) or "" (dual stack).
func (k key) family() string { _, f, _ := splitNetwork(k.network); return f }

// folder is the name of the group's pin folder.
func (k key) folder() string {
	name := fmt.Sprintf("%s-%s-%d", k.network, k.addr.Addr(), k.addr.Port())
	if k.device != "" {
		name += "-" + k.device
	}
	return bpffs.Escape(name)
}

func (k key) String() string {
	if k.device != "" {
		return fmt.Sprintf("%s %s on %s", k.network, k.addr, k.device)
	}
	return fmt.Sprintf("%s %s", k.network, k.addr)
}

// withDefaults fills what the caller left out and checks the rest.
func (o Options) withDefaults() (Options, key, error) {
	if o.Network == "" && o.Steering == SteeringTCP {
		o.Network = tcp
	}
	k, err := parseKey(o.Network, o.Address, o.Device)
	if err != nil {
		return o, k, err
	}
	if o.Service == "" {
		o.Service = filepath.Base(os.Args[0])
	}
	if len(o.Service) > 63 || strings.ContainsAny(o.Service, "\x00\n") {
		return o, k, fmt.Errorf("%w: service %q is longer than 63 bytes or has a line break", ErrOptions, o.Service)
	}
	if o.Steering == 0 {
		o.Steering = SteeringQUIC
		if k.protocol() == tcp {
			o.Steering = SteeringTCP
		}
	}
	if _, ok := steeringNames[o.Steering]; !ok {
		return o, k, fmt.Errorf("%w: %v; this build has quic, stateless, flow, wireguard, custom and tcp", ErrOptions, o.Steering)
	}
	if (o.Steering == SteeringTCP) != (k.protocol() == tcp) {
		return o, k, fmt.Errorf("%w: steering %s is not of network %q; leave one of them out", ErrOptions, o.Steering, k.network)
	}
	if o.Dissector != nil && o.Steering != SteeringCustom {
		return o, k, fmt.Errorf("%w: a Dissector is of SteeringCustom and the steering is %s", ErrOptions, o.Steering)
	}
	for _, n := range []struct {
		name             string
		value            *int
		least, most, def int
	}{
		{"MaxGenerations", &o.MaxGenerations, 2, LimitGenerations, DefaultMaxGenerations},
		{"Workers", &o.Workers, 1, LimitWorkers, DefaultWorkers},
		{"FlowEntries", &o.FlowEntries, 64, LimitFlowEntries, DefaultFlowEntries},
	} {
		if *n.value == 0 {
			*n.value = n.def
		}
		if *n.value < n.least || *n.value > n.most {
			return o, k, fmt.Errorf("%w: %s is %d, want %d to %d", ErrOptions, n.name, *n.value, n.least, n.most)
		}
	}
	if o.FlowTimeout == 0 {
		o.FlowTimeout = DefaultFlowTimeout
	}
	if o.FlowTimeout < time.Second || o.FlowTimeout > LimitFlowTimeout {
		return o, k, fmt.Errorf("%w: FlowTimeout is %v, want %v to %v", ErrOptions, o.FlowTimeout, time.Second, LimitFlowTimeout)
	}
	if int(o.FlowLearning) >= len(learningNames) {
		return o, k, fmt.Errorf("%w: FlowLearning is %d; use LearnReceived, LearnAnswered or LearnAssured", ErrOptions, o.FlowLearning)
	}
	if o.Steering == SteeringCustom && o.MaxGenerations == LimitGenerations && o.Workers == LimitWorkers {
		return o, k, fmt.Errorf("%w: with SteeringCustom there are no cookies for %d generations of %d workers; take one less of either",
			ErrOptions, LimitGenerations, LimitWorkers)
	}
	if o.ReceiveBuffer != 0 && k.protocol() == tcp {
		return o, k, fmt.Errorf("%w: ReceiveBuffer is of UDP; with TCP the kernel would not size the buffers of the connections itself", ErrOptions)
	}
	if o.ReceiveBuffer < 0 {
		return o, k, fmt.Errorf("%w: ReceiveBuffer is %d bytes, want 0 or more", ErrOptions, o.ReceiveBuffer)
	}
	if o.Root == "" {
		o.Root = DefaultRoot
	}
	if o.Build == "" {
		o.Build = build.ID()
	}
	if len(o.Build) > 31 {
		o.Build = o.Build[:31]
	}
	return o, k, nil
}

// prefixLen is the length of connection-ID prefixes under the options.
func (o Options) prefixLen() (int, error) {
	if o.LoadBalancer == nil {
		return bpf.PrefixMin, nil
	}
	codec, err := connid.New(connid.Keys{CID: [16]byte{1}, MulHandle: 1, MulGeneration: 1, Affinity: [16]byte{1}}, o.LoadBalancer)
	if err != nil {
		return 0, fmt.Errorf("%w: LoadBalancer: %w", ErrOptions, err)
	}
	return codec.PrefixLen(), nil
}
