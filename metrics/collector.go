// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/bpffs"
)

// DefaultFlowsEvery is how old counts of flows may be.
const DefaultFlowsEvery = 30 * time.Second

// DefaultHandoverTimeout is how long a server has to answer at its control socket.
const DefaultHandoverTimeout = time.Second

// Options say what a Collector reads. The zero value reads all groups below
// dispatch.DefaultRoot.
type Options struct {
	// Root is the folder below which groups are pinned. Default dispatch.DefaultRoot.
	Root string

	// Paths are the pin folders of the groups to read, instead of all below Root. One
	// that is not there is told as unreadable. Default: all.
	Paths []string

	// Groups are groups that this process has open, instead of those below Root: the way
	// for groups without pins. They stay the caller's, who may close them only when
	// nobody scrapes any more. Default: none.
	Groups []*dispatch.Group

	// Sockets are the control sockets (handover.Options.Socket) of servers whose
	// handovers to tell about. Only root and the server's own user get an answer.
	// Default: none.
	Sockets []string

	// HandoverTimeout is how long all of them have to answer. Default 1 s.
	HandoverTimeout time.Duration

	// FlowsEvery is how old the counts of the flows of steering flow may be. Counting walks
	// through the table, which takes a good part of a second of one CPU for a million flows;
	// a scrape after that time pays for it. Default 30 s; a negative value never counts.
	FlowsEvery time.Duration

	// Logger receives why groups and handovers could not be read, once for each reason.
	// Default: nothing is logged.
	Logger *slog.Logger
}

// Collector is a prometheus.Collector. It can be used by several goroutines; their
// collections take turns.
type Collector struct {
	o   Options
	log *slog.Logger
	now func() time.Time

	mu sync.Mutex
	// counted are the latest counts of the groups that were there in the last
	// collection.
	counted map[groupName]counts
	// listing is why the groups could not be listed in the last collection.
	listing error
	// warned are the complaints of the last collection, by what they are about: the same
	// one is logged once.
	warned, warnings map[string]string
}

var _ prometheus.Collector = (*Collector)(nil)

type groupName struct{ netns, name string }

type counts struct {
	at time.Time
	// packets are those of the group, which only a new one in its place has fewer of.
	packets uint64
	dispatch.FlowCounts
}

// New makes a collector. It reads nothing yet.
func New(options Options) *Collector {
	if options.Root == "" {
		options.Root = dispatch.DefaultRoot
	}
	if options.HandoverTimeout == 0 {
		options.HandoverTimeout = DefaultHandoverTimeout
	}
	if options.FlowsEvery == 0 {
		options.FlowsEvery = DefaultFlowsEvery
	}
	log := options.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Collector{o: options, log: log, now: time.Now, counted: make(map[groupName]counts)}
}

// Describe tells all metrics that there can be.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range catalog {
		out <- m.desc
	}
}

// Collect reads everything anew.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := c.now()
	c.warned, c.warnings = c.warnings, make(map[string]string)
	handovers := c.askHandovers()
	success := 1.0
	entries, err := c.entries()
	if c.listing = err; err != nil {
		c.warn("list groups", "root", c.o.Root, err)
		success = 0
	}
	before := c.counted
	c.counted = make(map[groupName]counts)
	told := make(map[groupName]bool, len(entries))
	for _, e := range entries {
		key := groupName{e.Netns, e.Name}
		if told[key] {
			c.warn("tell group", "path", e.Path, errors.New("another one has its name"))
			continue
		}
		told[key] = true
		c.collectGroup(out, e, before)
	}
	for _, h := range handovers() {
		c.collectHandover(out, h)
	}
	out <- collectionSuccess.of(success)
	out <- collectionDuration.of(c.now().Sub(start).Seconds())
}

// warn logs a complaint, unless the last collection had it too. Its caller holds mu.
func (c *Collector) warn(what, kind, about string, err error) {
	key, text := what+" "+about, err.Error()
	c.warnings[key] = text
	if c.warned[key] != text {
		c.log.Warn(what, kind, about, "err", err)
	}
}

// entry is a group and a way to count its flows.
type entry struct {
	dispatch.Entry
	open *dispatch.Group // nil: it is opened for that
}

// entries reads the groups.
func (c *Collector) entries() ([]entry, error) {
	var list []entry
	for _, g := range c.o.Groups {
		list = append(list, readOpen(g))
	}
	for _, path := range c.o.Paths {
		list = append(list, entry{Entry: read(path)})
	}
	if len(c.o.Groups)+len(c.o.Paths) > 0 {
		return list, nil
	}
	all, err := dispatch.List(c.o.Root)
	for _, e := range all {
		list = append(list, entry{Entry: e})
	}
	return list, err
}

// readOpen reads a group of this process. One without pins has no namespace's folder, and
// is named like a folder.
func readOpen(g *dispatch.Group) entry {
	e := entry{open: g}
	s, err := g.Snapshot()
	if e.Err = err; err == nil {
		e.Snapshot = &s
	}
	if path := g.Path(); path != "" {
		e.Path, e.Netns, e.Name = path, namespace(path), name(path)
	} else if err == nil {
		e.Name = s.Network + "-" + strings.NewReplacer("[", "", "]", "").Replace(s.Address)
		if i := strings.LastIndexByte(e.Name, ':'); i >= 0 {
			e.Name = e.Name[:i] + "-" + e.Name[i+1:]
		}
		if s.Device != "" {
			e.Name += "-" + s.Device
		}
	}
	return e
}

// read is an entry of dispatch.List for one path.
func read(path string) dispatch.Entry {
	path = filepath.Clean(path)
	e := dispatch.Entry{Path: path, Netns: namespace(path), Name: name(path)}
	g, err := dispatch.OpenPath(path)
	if err != nil {
		e.Err = err
		return e
	}
	s, err := g.Snapshot()
	if e.Err = errors.Join(err, g.Close()); e.Err == nil {
		e.Snapshot = &s
	}
	return e
}

func namespace(path string) string { return filepath.Base(filepath.Dir(path)) }

func name(path string) string {
	if n, err := bpffs.Unescape(filepath.Base(path)); err == nil {
		return n
	}
	return filepath.Base(path)
}

// states are those that a generation can be told in.
var states = []dispatch.State{dispatch.StateStaged, dispatch.StateActive, dispatch.StateDraining}

func (c *Collector) collectGroup(out chan<- prometheus.Metric, e entry, before map[groupName]counts) {
	netns, group := e.Netns, e.Name
	s := e.Snapshot
	if s == nil {
		c.warn("read group", "group", netns+"/"+group, e.Err)
		out <- groupReadable.of(0, netns, group)
		return
	}
	out <- groupReadable.of(1, netns, group)
	out <- groupInfo.of(1, netns, group, s.Network, s.Address, s.Device, s.Service, s.Steering, s.Program,
		strconv.FormatUint(uint64(s.Layout), 10))
	out <- groupActive.of(float64(s.Active), netns, group)
	out <- groupGenerationsLimit.of(float64(s.MaxGenerations), netns, group)
	out <- groupWorkersLimit.of(float64(s.MaxWorkers), netns, group)
	for _, state := range states {
		n := 0
		for _, g := range s.Generations {
			if g.State == state {
				n++
			}
		}
		out <- groupGenerations.of(float64(n), netns, group, state.String())
	}
	verdicts, traffic := groupPackets, generationPackets
	if s.Steering == dispatch.SteeringTCP.String() {
		verdicts, traffic = groupConnections, generationConnections
	}
	for _, verdict := range slices.Sorted(maps.Keys(s.Verdicts)) {
		out <- verdicts.of(float64(s.Verdicts[verdict]), netns, group, verdict)
	}
	if s.FlowEntries > 0 {
		out <- groupFlowsLimit.of(float64(s.FlowEntries), netns, group)
	}
	if s.FlowTimeout > 0 {
		out <- groupFlowTimeout.of(float64(s.FlowTimeout), netns, group)
	}
	flows, counted := c.count(e, before)
	if counted {
		out <- groupFlowsEnded.of(float64(flows.Ended), netns, group)
		out <- groupFlowsEvicted.of(float64(flows.Evicted), netns, group)
		out <- groupFlowsCounted.of(timestamp(flows.at), netns, group)
	}
	for _, g := range s.Generations {
		labels := []string{netns, group, strconv.FormatUint(uint64(g.Number), 10)}
		out <- generationInfo.of(1, append(labels, g.Build, strconv.Itoa(g.PID), g.Command)...)
		for _, state := range states {
			out <- generationState.of(truth(g.State == state), append(labels, state.String())...)
		}
		out <- generationWorkers.of(float64(g.Workers), labels...)
		out <- generationSockets.of(float64(g.Live), labels...)
		out <- traffic.of(float64(g.Packets), labels...)
		if counted {
			out <- generationFlows.of(float64(flows.Live[g.Number]), labels...)
		}
		for _, t := range []struct {
			metric *metric
			at     time.Time
		}{
			{generationLast, g.LastPacket}, {generationJoined, g.Joined}, {generationActivated, g.Activated},
			{generationSuperseded, g.Superseded}, {generationDeadline, g.Deadline},
		} {
			if !t.at.IsZero() {
				out <- t.metric.of(timestamp(t.at), labels...)
			}
		}
	}
}

// count returns the flows of a group, which were counted in this collection or are new
// enough. Its caller holds mu.
func (c *Collector) count(e entry, before map[groupName]counts) (n counts, ok bool) {
	if e.Snapshot.Steering != dispatch.SteeringFlow.String() || c.o.FlowsEvery < 0 {
		return n, false
	}
	key := groupName{e.Netns, e.Name}
	n, ok = before[key]
	if now := c.now(); !ok || now.Sub(n.at) >= c.o.FlowsEvery || now.Before(n.at) {
		counted, err := e.flows()
		if err != nil {
			c.warn("count flows", "group", e.Netns+"/"+e.Name, err)
			return n, false
		}
		if ok && e.Snapshot.Packets >= n.packets {
			// The counting of evictions is no snapshot, and a counter does not go back.
			counted.Evicted = max(counted.Evicted, n.Evicted)
		}
		n = counts{now, e.Snapshot.Packets, counted}
	}
	c.counted[key] = n
	return n, true
}

func (e entry) flows() (dispatch.FlowCounts, error) {
	if e.open != nil {
		return e.open.FlowCounts()
	}
	g, err := dispatch.OpenPath(e.Path)
	if err != nil {
		return dispatch.FlowCounts{}, err
	}
	n, err := g.FlowCounts()
	return n, errors.Join(err, g.Close())
}

// answer is what a server said at its control socket.
type answer struct {
	socket string
	status handover.Status
	err    error
}

// askHandovers asks all servers at once; the function that it returns waits for their
// answers.
func (c *Collector) askHandovers() func() []answer {
	answers := make([]answer, len(c.o.Sockets))
	ctx, cancel := context.WithTimeout(context.Background(), c.o.HandoverTimeout)
	var wait sync.WaitGroup
	for i, socket := range c.o.Sockets {
		wait.Go(func() {
			status, err := handover.RequestStatus(ctx, socket)
			answers[i] = answer{socket, status, err}
		})
	}
	return func() []answer {
		wait.Wait()
		cancel()
		return answers
	}
}

// phases are those in which a process answers at its control socket, and those in which it
// just began or ceased to.
var phases = []string{"starting", "active", "paused", "draining", "closed"}

func (c *Collector) collectHandover(out chan<- prometheus.Metric, a answer) {
	if a.err != nil {
		c.warn("ask server", "socket", a.socket, a.err)
		out <- handoverUp.of(0, a.socket)
		return
	}
	s := a.status
	out <- handoverUp.of(1, a.socket)
	out <- handoverInfo.of(1, a.socket, s.Name, s.Build, strconv.Itoa(s.PID))
	out <- handoverGeneration.of(float64(s.Generation), a.socket)
	for _, phase := range phases {
		out <- handoverPhase.of(truth(s.Phase == phase), a.socket, phase)
	}
	out <- handoverUpgrading.of(truth(s.Upgrading), a.socket)
	out <- handoverProbation.of(truth(s.Probation), a.socket)
	out <- handoverDraining.of(float64(len(s.Older)), a.socket)
	out <- handoverDescriptors.of(float64(len(s.Handed)), a.socket)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// timestamp is exact to a millisecond: dispatch reads two clocks for an instant, and what
// differs between two readings is no change.
func timestamp(t time.Time) float64 { return float64(t.Round(time.Millisecond).UnixMilli()) / 1e3 }
