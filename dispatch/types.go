// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"time"
)

// State is the stage of a generation's life.
type State uint8

const (
	// StateGone means that the generation holds no socket (any more).
	StateGone State = iota
	// StateStaged means that its sockets are registered and it was never
	// active. New flows reach it only when nothing else in the group lives.
	StateStaged
	// StateActive means that new flows go to it.
	StateActive
	// StateDraining means that it was active before: its flows stay with it.
	StateDraining
)

func (s State) String() string {
	switch s {
	case StateStaged:
		return "staged"
	case StateActive:
		return "active"
	case StateDraining:
		return "draining"
	default:
		return "gone"
	}
}

// MarshalText writes the state as a word.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// GenerationInfo is what the group's table says of one generation.
type GenerationInfo struct {
	Number  uint32 `json:"number"`
	Slot    int    `json:"slot"`
	State   State  `json:"state"`
	Workers int    `json:"workers"`
	// Live counts the workers whose socket is still registered.
	Live int `json:"live"`
	// PID is the process that joined, as seen from its own PID namespace.
	PID int `json:"pid"`
	// Command is the name of that process (/proc/PID/comm), empty when it is
	// gone or lives in another PID namespace.
	Command string `json:"command,omitempty"`
	Build   string `json:"build,omitempty"`
	// Packets counts what the data plane gave to the generation since it joined; with
	// "tcp" connections.
	Packets uint64 `json:"packets"`
	// LastPacket is when the latest of them came; zero when none did. It is
	// exact to one tick of the kernel (1 to 10 ms).
	LastPacket time.Time `json:"last_packet,omitzero"`
	Joined     time.Time `json:"joined,omitzero"`
	// Activated is when it last became active; zero when it never was.
	Activated time.Time `json:"activated,omitzero"`
	// Superseded is when another generation took its place; zero while that
	// has not happened.
	Superseded time.Time `json:"superseded,omitzero"`
	// Deadline is when its drain ends at the latest; zero when none is set.
	Deadline time.Time `json:"deadline,omitzero"`
}

// Snapshot is a consistent picture of a group, taken without the lock.
type Snapshot struct {
	Path    string `json:"path"`
	Network string `json:"network"`
	Address string `json:"address"`
	Device  string `json:"device,omitempty"`
	Service string `json:"service"`
	// Steering is the data plane's name, "quic", "stateless", "flow", "wireguard", "custom" or "tcp".
	Steering string `json:"steering"`
	// Layout is the version of the maps; Program the build of the kernel
	// program that is pinned for the group.
	Layout  uint32 `json:"layout"`
	Program string `json:"program"`
	// Active is the number of the active generation, 0 when there is none.
	Active         uint32 `json:"active"`
	MaxGenerations int    `json:"max_generations"`
	MaxWorkers     int    `json:"max_workers"`
	// FlowEntries is 0 where the steering has no table of flows.
	FlowEntries int `json:"flow_entries"`
	// FlowTimeout, in seconds, is of "flow" and "wireguard", FlowLearning, "received",
	// "answered" or "assured", of "flow".
	FlowTimeout  int    `json:"flow_timeout_s,omitempty"`
	FlowLearning string `json:"flow_learning,omitempty"`
	// Generations holds all that are not gone, in the order of last resort:
	// the active one first, then those that were active before it, the latest
	// first, then the staged ones, the newest first.
	Generations []GenerationInfo `json:"generations"`
	// Verdicts counts packets by how the data plane decided, since the group
	// was made. Every packet counts once.
	Verdicts map[string]uint64 `json:"verdicts"`
	// Packets is the sum of Verdicts.
	Packets uint64 `json:"packets"`
}

// Entry is one group of a listing.
type Entry struct {
	Path string `json:"path"`
	// Netns names the network namespace's folder; Here says whether it is the
	// caller's own.
	Netns string `json:"netns"`
	Here  bool   `json:"here"`
	Name  string `json:"name"`
	// Snapshot is nil when the group could not be read; Err says why.
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	Err      error     `json:"-"`
}

// DrainOptions say when a drain is over. Whatever comes first ends it. With SteeringFlow
// it also ends when no flow of the generation lives.
type DrainOptions struct {
	// Done is closed by the owner when its last flow ended. Default: never.
	Done <-chan struct{}
	// Idle ends the drain when the generation got no packet for so long.
	// Default 0: never.
	Idle time.Duration
	// Deadline ends the drain so long after its start. Default 0: none, unless
	// somebody sets one from outside (Group.SetDeadline).
	Deadline time.Duration
	// Final lets the active generation drain, which is how a service ends. Default
	// false: Drain of the active generation returns ErrReinstated, so that one that
	// was reinstated a moment ago does not leave by mistake.
	Final bool
	// Grace is how long the sockets are read after they left the map, for
	// packets that the kernel had already assigned. Default 20 ms.
	Grace time.Duration
}

// DrainReport says how a drain went.
type DrainReport struct {
	// Reason is "done", "idle", "deadline", "flows ended" (SteeringFlow), or "evicted"
	// when the generation was out of the group already (Group.Evict).
	Reason string `json:"reason"`
	// Waited is the time until then.
	Waited time.Duration `json:"waited"`
	// Queued counts the sockets that still had datagrams in their queues after
	// the grace period; Drain waited until the owner had read them.
	Queued int `json:"queued"`
	// Flows counts those that still lived at the end, with SteeringFlow: their next
	// packets go to the active generation.
	Flows int `json:"flows"`
}
