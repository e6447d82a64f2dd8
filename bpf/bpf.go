// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Structures of abi.h, as Go sees them in mapped memory. The aliases are the only
// names by which other packages know them.
type (
	// Control is the group: who is there and who is active.
	Control = quicInstarControl
	// Slot is what the packet path reads of a generation.
	Slot = quicInstarSlot
	// Order is an order of last resort.
	Order = quicInstarOrder
	// Info is what the control plane remembers of a generation.
	Info = quicInstarInfo
	// Secrets are the group's keys.
	Secrets = quicInstarSecrets
	// Flow is the value of the flow table with QUIC.
	Flow = quicInstarFlow
	// Peer is the key of the flow table of SteeringFlow.
	Peer = flowInstarPeer
	// Tracked is its value, and that of SteeringWireGuard, whose key is an index.
	Tracked = flowInstarTracked
	// Counters are one CPU's counters.
	Counters = quicInstarCounters
	// Event is what became of a packet.
	Event = quicInstarEvent
	// Traced is what a CPU knows of a trace.
	Traced = quicInstarTraced
	// Verdict is the outcome of a packet.
	Verdict = quicInstarVerdict
)

// Numbers of abi.h.
const (
	// Layout is the version of the maps that this build reads and writes.
	Layout     = uint32(quicInstarAbiINSTAR_LAYOUT)
	MaxSlots   = int(quicInstarAbiINSTAR_SLOTS)
	MaxWorkers = int(quicInstarAbiINSTAR_WORKERS)
	Orders     = int(quicInstarAbiINSTAR_ORDERS)
	PrefixMin  = int(quicInstarAbiINSTAR_PREFIX_MIN)
	PrefixMax  = int(quicInstarAbiINSTAR_PREFIX_MAX)

	StageFree    = uint32(quicInstarStageINSTAR_STAGE_FREE)
	StageJoining = uint32(quicInstarStageINSTAR_STAGE_JOINING)
	StageJoined  = uint32(quicInstarStageINSTAR_STAGE_JOINED)

	SteeringQUIC      = uint32(quicInstarSteeringINSTAR_STEERING_QUIC)
	SteeringStateless = uint32(quicInstarSteeringINSTAR_STEERING_STATELESS)
	SteeringFlow      = uint32(quicInstarSteeringINSTAR_STEERING_FLOW)
	SteeringWireGuard = uint32(quicInstarSteeringINSTAR_STEERING_WIREGUARD)
	SteeringCustom    = uint32(quicInstarSteeringINSTAR_STEERING_CUSTOM)
	SteeringTCP       = uint32(quicInstarSteeringINSTAR_STEERING_TCP)

	// DissectedCookies is the first number that is no cookie, of which 0 is none either;
	// DissectedKey marks a key.
	DissectedCookies = uint64(customInstarDissectedINSTAR_DISSECTED_COOKIES)
	DissectedKey     = uint64(1) << customInstarDissectedINSTAR_DISSECTED_KEY_BIT

	LearningReceived = uint8(flowInstarLearningINSTAR_LEARNING_RECEIVED)
	LearningAssured  = uint8(flowInstarLearningINSTAR_LEARNING_ASSURED)
	LearningAnswered = uint8(flowInstarLearningINSTAR_LEARNING_ANSWERED)

	VerdictOwner    = quicInstarVerdictINSTAR_VERDICT_OWNER
	VerdictKnown    = quicInstarVerdictINSTAR_VERDICT_KNOWN
	VerdictNew      = quicInstarVerdictINSTAR_VERDICT_NEW
	VerdictOrphan   = quicInstarVerdictINSTAR_VERDICT_ORPHAN
	VerdictUnknown  = quicInstarVerdictINSTAR_VERDICT_UNKNOWN
	VerdictInvalid  = quicInstarVerdictINSTAR_VERDICT_INVALID
	VerdictFallback = quicInstarVerdictINSTAR_VERDICT_FALLBACK
	VerdictDrop     = quicInstarVerdictINSTAR_VERDICT_DROP
	Verdicts        = int(quicInstarVerdictINSTAR_VERDICTS)
)

// VerdictNames are the words for verdicts in listings and metrics, by number.
var VerdictNames = [Verdicts]string{
	VerdictOwner:    "owner",
	VerdictKnown:    "known",
	VerdictNew:      "new",
	VerdictOrphan:   "orphan",
	VerdictUnknown:  "unknown",
	VerdictInvalid:  "invalid",
	VerdictFallback: "fallback",
	VerdictDrop:     "drop",
}

// Names of a group's maps in its program's object.
const (
	MapSockets  = quicMapSockets
	MapFlows    = quicMapFlows
	MapVerdicts = quicMapVerdicts
	// MapEvents and MapTraced are of a trace.
	MapEvents  = quicMapEvents
	MapTraced  = quicMapTraced
	MapControl = ".data.control"
	MapSecrets = ".data.secrets"
)

// Config sizes the maps and programs of one group.
type Config struct {
	// Steering is one of the constants.
	Steering uint32
	// MaxGenerations and MaxWorkers give the socket map its size.
	MaxGenerations, MaxWorkers int
	// FlowEntries is the size of the flow table; ignored where the steering
	// has none.
	FlowEntries int
	// Prefix is the length of connection-ID prefixes, PrefixMin to PrefixMax.
	Prefix int
	// FlowTimeout is when SteeringFlow forgets a silent flow, and SteeringWireGuard an
	// index, in seconds, 1 or more; FlowLearning is when SteeringFlow remembers one.
	FlowTimeout  uint16
	FlowLearning uint8
	// Dissector is the function of SteeringCustom.
	Dissector *Dissector
	// Trace is the size in octets of a ring buffer of events, a power of two and a multiple
	// of the page size; the program tells it of each packet, which takes up to a
	// microsecond (Linux 5.8). 0: there is none, and nothing of it is in the program.
	Trace uint32
}

// ErrConfig means that a group cannot have these sizes.
var ErrConfig = errors.New("invalid size")

// ErrSteering means that this build has no data plane of that number.
var ErrSteering = errors.New("unknown steering")

// plane is the data plane of a steering.
type plane struct {
	load    func() (*ebpf.CollectionSpec, error)
	program string
	object  []byte
}

func planeOf(steering uint32) (plane, error) {
	switch steering {
	case SteeringQUIC:
		return plane{loadQuic, quicProgQuic, _QuicBytes}, nil
	case SteeringStateless:
		return plane{loadStateless, statelessProgStateless, _StatelessBytes}, nil
	case SteeringFlow:
		return plane{loadFlow, flowProgFlow, _FlowBytes}, nil
	case SteeringWireGuard:
		return plane{loadWireguard, wireguardProgWireguard, _WireguardBytes}, nil
	case SteeringCustom:
		return plane{loadCustom, customProgCustom, _CustomBytes}, nil
	case SteeringTCP:
		return plane{loadTcp, tcpProgTcp, _TcpBytes}, nil
	default:
		return plane{}, fmt.Errorf("%w %d", ErrSteering, steering)
	}
}

// Spec returns the data plane of one group, sized and with its constants set,
// and the name of its program. Minimum kernel: 5.7 (global functions, mapped
// arrays, bounded loops, the jiffies helper), and 5.14 for SteeringTCP (migration of
// waiting connections); loading needs CAP_BPF and CAP_NET_ADMIN.
func Spec(c Config) (*ebpf.CollectionSpec, string, error) {
	plane, err := planeOf(c.Steering)
	if err != nil {
		return nil, "", err
	}
	spec, err := plane.load()
	if err != nil {
		return nil, "", fmt.Errorf("read data plane: %w", err)
	}
	if err := configure(spec, c); err != nil {
		return nil, "", err
	}
	if err := trace(spec, c.Trace); err != nil {
		return nil, "", err
	}
	if c.Steering == SteeringCustom {
		if err := link(spec, plane.program, c.Dissector); err != nil {
			return nil, "", err
		}
	}
	return spec, plane.program, nil
}

// Build names the program that this build carries for a steering: the start of
// the SHA-256 of its object and its dissector, if it has one; "" for a steering that it
// does not know.
func Build(steering uint32, d *Dissector) string {
	plane, err := planeOf(steering)
	if err != nil {
		return ""
	}
	h := sha256.New()
	h.Write(plane.object)
	if d != nil {
		h.Write(d.Source)
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}

func configure(spec *ebpf.CollectionSpec, c Config) error {
	for _, n := range []struct {
		name               string
		value, least, most int
	}{
		{"MaxGenerations", c.MaxGenerations, 1, MaxSlots},
		{"MaxWorkers", c.MaxWorkers, 1, MaxWorkers},
		{"Prefix", c.Prefix, PrefixMin, PrefixMax},
	} {
		if n.value < n.least || n.value > n.most {
			return fmt.Errorf("%w: %s is %d, want %d to %d", ErrConfig, n.name, n.value, n.least, n.most)
		}
	}
	if spec.Maps[MapFlows] != nil && c.FlowEntries < 1 {
		return fmt.Errorf("%w: FlowEntries is %d, want 1 or more", ErrConfig, c.FlowEntries)
	}
	if c.Steering == SteeringFlow || c.Steering == SteeringWireGuard {
		if c.FlowTimeout < 1 {
			return fmt.Errorf("%w: FlowTimeout is 0 s, want 1 or more", ErrConfig)
		}
		if c.FlowLearning > LearningAnswered {
			return fmt.Errorf("%w: FlowLearning is %d", ErrConfig, c.FlowLearning)
		}
	}
	for name, value := range map[string]any{
		quicVarMaxWorkers:    uint32(c.MaxWorkers),
		quicVarPrefix:        uint32(c.Prefix),
		flowVarFlowTimeoutNs: uint64(c.FlowTimeout) * 1e9,
		flowVarFlowLearning:  uint32(c.FlowLearning),
	} {
		if v := spec.Variables[name]; v != nil {
			if err := v.Set(value); err != nil {
				return fmt.Errorf("set constant %s: %w", name, err)
			}
		}
	}
	spec.Maps[MapSockets].MaxEntries = uint32(c.MaxGenerations * c.MaxWorkers)
	if m := spec.Maps[MapFlows]; m != nil {
		m.MaxEntries = uint32(c.FlowEntries)
	}
	return nil
}
