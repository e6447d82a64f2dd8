// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metric is a family of time series.
type metric struct {
	name string
	// counter tells a counter from a gauge.
	counter bool
	// unit is that of docs/metrics.md.
	unit   string
	labels []string
	help   string
	desc   *prometheus.Desc
}

var catalog []*metric

// define adds a metric to the catalog. The labels are those of its scope and more.
func define(counter bool, name, unit, help string, scope []string, more ...string) *metric {
	labels := slices.Concat(scope, more)
	m := &metric{name: name, counter: counter, unit: unit, labels: labels, help: help,
		desc: prometheus.NewDesc(name, help, labels, nil)}
	catalog = append(catalog, m)
	return m
}

func gauge(name, unit, help string, scope []string, more ...string) *metric {
	return define(false, name, unit, help, scope, more...)
}

func counter(name, unit, help string, scope []string, more ...string) *metric {
	return define(true, name, unit, help, scope, more...)
}

// of makes a sample of the metric. The name of a process, or of a service, can be any
// bytes; labels are UTF-8.
func (m *metric) of(value float64, labels ...string) prometheus.Metric {
	kind := prometheus.GaugeValue
	if m.counter {
		kind = prometheus.CounterValue
	}
	for i := range labels {
		labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
	}
	return prometheus.MustNewConstMetric(m.desc, kind, value, labels...)
}

// The labels that the metrics of a scope share.
var (
	ofMachine    []string
	ofGroup      = []string{"netns", "group"}
	ofGeneration = []string{"netns", "group", "generation"}
	ofHandover   = []string{"socket"}
)

// Units.
const (
	always   = "always 1"
	flag     = "0 or 1"
	seconds  = "seconds"
	instant  = "seconds since 1970"
	number   = "number"
	packets  = "packets"
	requests = "connections"
	flows    = "flows"
	sockets  = "sockets"
)

// The catalog. docs/metrics.md repeats it, and a test compares the two.
var (
	collectionSuccess = gauge("instar_collection_success", flag,
		"1 when the groups could be listed; 0 without a bpffs, or without the right to read it.", ofMachine)
	collectionDuration = gauge("instar_collection_duration_seconds", seconds,
		"How long it took to read all groups and handovers.", ofMachine)

	groupReadable = gauge("instar_group_readable", flag,
		"1 when the group could be read; 0 when a right is missing, or another build made it. Then it has no other metric.", ofGroup)
	groupInfo = gauge("instar_group_info", always,
		"The labels say which sockets the group has, how it is steered, and which build of the kernel program steers it.", ofGroup,
		"network", "address", "device", "service", "steering", "program", "layout")
	groupActive = gauge("instar_group_active_generation", number,
		"Number of the active generation, 0 when none is. It changes with each flip.", ofGroup)
	groupGenerations = gauge("instar_group_generations", number,
		"Generations in each state: staged, active or draining.", ofGroup, "state")
	groupGenerationsLimit = gauge("instar_group_generations_limit", number,
		"How many generations may hold sockets at a time; one more is refused.", ofGroup)
	groupWorkersLimit = gauge("instar_group_workers_limit", number,
		"How many sockets one generation may have.", ofGroup)
	groupPackets = counter("instar_group_packets_total", packets,
		"Packets by how the data plane decided, each counted once, since the group was made.", ofGroup, "verdict")
	groupConnections = counter("instar_group_connections_total", requests,
		"With steering tcp: connections by how the data plane decided, since the group was made.", ofGroup, "verdict")
	groupFlowsLimit = gauge("instar_group_flows_limit", flows,
		"Entries of the table of flows, where the steering has one. When it is full the least recently used flow is forgotten.", ofGroup)
	groupFlowTimeout = gauge("instar_group_flow_timeout_seconds", seconds,
		"How long a flow (steering flow) or an index (steering wireguard) may be silent until it is forgotten.", ofGroup)
	groupFlowsEnded = gauge("instar_group_flows_ended", flows,
		"With steering flow: entries of the table whose flow timed out, or whose generation is gone. They are used again when their turn comes.", ofGroup)
	groupFlowsEvicted = counter("instar_group_flows_evicted_total", flows,
		"With steering flow: entries of the table that the kernel gave to other flows, since the group was made, when they were counted.", ofGroup)
	groupFlowsCounted = gauge("instar_group_flows_counted_timestamp_seconds", instant,
		"When the flows of the group were counted last; that is not done at each scrape.", ofGroup)

	generationInfo = gauge("instar_generation_info", always,
		"The labels tell the build and the process. The pid is that of its own PID namespace.", ofGeneration,
		"build", "pid", "command")
	generationState = gauge("instar_generation_state", flag,
		"1 for the state that the generation is in, 0 for the others.", ofGeneration, "state")
	generationWorkers = gauge("instar_generation_workers", sockets,
		"Sockets with which the generation joined.", ofGeneration)
	generationSockets = gauge("instar_generation_sockets", sockets,
		"Sockets of it that are registered. 0 in a dead generation that no other process has noticed.", ofGeneration)
	generationFlows = gauge("instar_generation_flows", flows,
		"With steering flow: live flows of the generation, when they were counted.", ofGeneration)
	generationPackets = counter("instar_generation_packets_total", packets,
		"Packets that the data plane gave to the generation since it joined.", ofGeneration)
	generationConnections = counter("instar_generation_connections_total", requests,
		"With steering tcp: connections that the data plane gave to the generation since it joined.", ofGeneration)
	generationLast = gauge("instar_generation_last_traffic_timestamp_seconds", instant,
		"When the latest of its packets (steering tcp: connections) came, exact to 10 ms. Missing while none did.", ofGeneration)
	generationJoined = gauge("instar_generation_joined_timestamp_seconds", instant,
		"When it registered its sockets.", ofGeneration)
	generationActivated = gauge("instar_generation_activated_timestamp_seconds", instant,
		"When it last became active. Missing when it never was.", ofGeneration)
	generationSuperseded = gauge("instar_generation_superseded_timestamp_seconds", instant,
		"When another generation took its place. Missing while that has not happened.", ofGeneration)
	generationDeadline = gauge("instar_generation_deadline_timestamp_seconds", instant,
		"When its drain ends at the latest. Missing when no deadline is set.", ofGeneration)

	handoverUp = gauge("instar_handover_up", flag,
		"1 when a server answered at its control socket; 0 when none is there, it starts, hands over at this moment, or refuses this user. "+
			"Then it has no other metric.", ofHandover)
	handoverInfo = gauge("instar_handover_info", always,
		"The labels tell the server's name, the build and the pid of the process that answered.", ofHandover, "name", "build", "pid")
	handoverGeneration = gauge("instar_handover_generation", number,
		"Number of the process that answered, in the succession of the server's processes.", ofHandover)
	handoverPhase = gauge("instar_handover_phase", flag,
		"1 for the phase of the process that answered, 0 for the others.", ofHandover, "phase")
	handoverUpgrading = gauge("instar_handover_upgrading", flag,
		"1 while an upgrade is under way.", ofHandover)
	handoverProbation = gauge("instar_handover_probation", flag,
		"1 while the predecessor can still take back.", ofHandover)
	handoverDraining = gauge("instar_handover_draining_processes", number,
		"Processes before the one that answered that still drain.", ofHandover)
	handoverDescriptors = gauge("instar_handover_descriptors", number,
		"Sockets and files that go to a successor.", ofHandover)
)
