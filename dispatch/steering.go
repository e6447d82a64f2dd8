// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"

	"instar/bpf"
)

// Steering is how the data plane finds the owner of a packet.
type Steering uint32

const (
	// SteeringQUIC finds the owner by the connection ID, which the server makes
	// with [Generation.ConnectionIDs]; handshakes stay with the process that got
	// their first packet.
	SteeringQUIC = Steering(bpf.SteeringQUIC)
	// SteeringStateless gives every packet to the active generation: DNS, NTP.
	SteeringStateless = Steering(bpf.SteeringStateless)
	// SteeringFlow gives all packets of one sender, an address and port, to the process
	// that got the first of them: protocols that name no session.
	SteeringFlow = Steering(bpf.SteeringFlow)
	// SteeringWireGuard gives a handshake's first message to the active generation, and
	// every other one to the generation that announced the index which it names
	// ([Generation.OwnIndex]).
	SteeringWireGuard = Steering(bpf.SteeringWireGuard)
	// SteeringCustom finds the owner by a function of the group's own, [Options].Dissector.
	SteeringCustom = Steering(bpf.SteeringCustom)
	// SteeringTCP gives new connections to the active generation, and moves those that
	// wait at a listener which closes, in its accept queue or half open, to it. Linux
	// 5.14 is the first that can (SEC("sk_reuseport/migrate")). Established connections
	// are sockets of their own, which no steering concerns.
	SteeringTCP = Steering(bpf.SteeringTCP)
)

var steeringNames = map[Steering]string{
	SteeringQUIC:      "quic",
	SteeringStateless: "stateless",
	SteeringFlow:      "flow",
	SteeringWireGuard: "wireguard",
	SteeringCustom:    "custom",
	SteeringTCP:       "tcp",
}

func (s Steering) String() string {
	if name, ok := steeringNames[s]; ok {
		return name
	}
	return fmt.Sprintf("steering %d", uint32(s))
}

// ParseSteering reads the name of a steering.
func ParseSteering(name string) (Steering, error) {
	for s, n := range steeringNames {
		if n == name {
			return s, nil
		}
	}
	return 0, fmt.Errorf("%w: steering %q; this build has quic, stateless, flow, wireguard, custom and tcp", ErrOptions, name)
}
