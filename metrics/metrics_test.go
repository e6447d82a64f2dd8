// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"instar/dispatch"
	"instar/handover"
	"instar/internal/kernel"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// scraped is what a scrape told: the value of each series, written as in the text format,
// with its labels in alphabetical order.
type scraped map[string]float64

// scrape collects once, through a registry that compares what is collected with what
// was described.
func scrape(t *testing.T, c *Collector) (scraped, map[string]*dto.MetricFamily) {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(c); err != nil {
		t.Fatal(err)
	}
	gathered, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	series, families := scraped{}, map[string]*dto.MetricFamily{}
	for _, f := range gathered {
		families[f.GetName()] = f
		for _, m := range f.GetMetric() {
			labels := []string{}
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			value := m.GetGauge().GetValue()
			if m.Counter != nil {
				value = m.GetCounter().GetValue()
			}
			series[fmt.Sprintf("%s{%s}", f.GetName(), strings.Join(labels, ","))] = value
		}
	}
	return series, families
}

// named are the series of one metric, without its name.
func (s scraped) named(metric string) scraped {
	some := scraped{}
	for series, value := range s {
		if rest, ok := strings.CutPrefix(series, metric+"{"); ok {
			some["{"+rest] = value
		}
	}
	return some
}

func (s scraped) want(t *testing.T, metric string, want scraped) {
	t.Helper()
	if got := s.named(metric); !maps.Equal(got, want) {
		t.Errorf("%s is\n\t%v, want\n\t%v", metric, got, want)
	}
}

// machine is a network namespace, and a bpffs with groups.
type machine struct {
	*testing.T
	root string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testutil.NeedRoot(t)
	testutil.NetNS(t)
	return &machine{t, filepath.Join(testutil.BPFFS(t), "instar")}
}

func (m *machine) open(o dispatch.Options) *dispatch.Group {
	m.Helper()
	o.Root, o.Service, o.Build = m.root, "test", "b1"
	if o.MaxGenerations == 0 {
		o.MaxGenerations, o.Workers, o.FlowEntries = 4, 4, 64
	}
	g, err := dispatch.Open(o)
	if err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { m.must(g.Close()) })
	return g
}

func (m *machine) join(g *dispatch.Group, activate bool) *dispatch.Generation {
	m.Helper()
	n, err := g.Join(2)
	m.must(err)
	m.Cleanup(func() { m.must(n.Close()) })
	if activate {
		m.must(n.Activate())
	}
	return n
}

func (m *machine) must(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// send sends n datagrams from one socket, and returns once the group has counted them.
func (m *machine) send(g *dispatch.Group, n int) {
	m.Helper()
	before, err := g.Snapshot()
	m.must(err)
	c, err := net.Dial("udp", before.Address)
	m.must(err)
	defer c.Close()
	for range n {
		_, err := c.Write([]byte("hello"))
		m.must(err)
	}
	testutil.WaitFor(m, 10*time.Second, func() bool {
		after, err := g.Snapshot()
		m.must(err)
		return after.Packets == before.Packets+uint64(n)
	}, "%d packets more", n)
}

// serve is a server with a control socket, ready.
func (m *machine) serve(socket string) {
	m.Helper()
	h, err := handover.New(handover.Options{Socket: socket, Name: "app", Build: "b7"})
	m.must(err)
	m.Cleanup(func() { m.must(h.Close()) })
	_, err = h.Listen("web", "tcp", "127.0.0.1:0")
	m.must(err)
	m.must(h.Ready(context.Background()))
}

// TestScrape has everything that there can be on one machine, and compares the scrape with
// the catalog: no metric is told that is not in it, and none is in it that nothing tells.
func TestScrape(t *testing.T) {
	m := newMachine(t)
	testutil.Since(t, kernel.Version{Major: 5, Minor: 14}, "TCP listeners have generations")
	quic := m.open(dispatch.Options{Address: "127.0.0.1:443"})
	m.join(quic, true)
	m.send(quic, 3)
	m.join(quic, true)
	m.send(quic, 2)
	m.join(quic, false)
	deadline := time.Now().Add(time.Minute)
	m.must(quic.SetDeadline(1, deadline))

	flow := m.open(dispatch.Options{Address: "[::1]:7007", Steering: dispatch.SteeringFlow, FlowTimeout: 90 * time.Second})
	m.join(flow, true)
	m.send(flow, 1)
	m.send(flow, 1)

	tcp := m.open(dispatch.Options{Network: "tcp", Address: "127.0.0.1:80", Steering: dispatch.SteeringTCP})
	m.join(tcp, true)
	c, err := net.Dial("tcp", "127.0.0.1:80")
	m.must(err)
	m.must(c.Close())

	dns := m.open(dispatch.Options{Address: "127.0.0.1:53", Steering: dispatch.SteeringStateless})
	netns := filepath.Base(filepath.Dir(quic.Path()))
	m.must(os.Mkdir(filepath.Join(m.root, netns, "udp4-strange"), 0o755))

	dir := t.TempDir()
	socket, nobody := filepath.Join(dir, "app.sock"), filepath.Join(dir, "none.sock")
	m.serve(socket)
	collector := New(Options{Root: m.root, Sockets: []string{socket, nobody}, HandoverTimeout: time.Minute})
	got, families := scrape(t, collector)

	for _, known := range catalog {
		f, ok := families[known.name]
		if !ok {
			t.Errorf("%s is in the catalog, and was not scraped", known.name)
			continue
		}
		kind := dto.MetricType_GAUGE
		if known.counter {
			kind = dto.MetricType_COUNTER
		}
		if f.GetType() != kind || f.GetHelp() != known.help {
			t.Errorf("%s is a %v: %s", known.name, f.GetType(), f.GetHelp())
		}
		labels := []string{}
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		if want := slices.Sorted(slices.Values(known.labels)); !slices.Equal(labels, want) {
			t.Errorf("%s has the labels %v, want %v", known.name, labels, want)
		}
	}
	if len(families) != len(catalog) {
		t.Errorf("%d metrics were scraped, and %d are in the catalog", len(families), len(catalog))
	}

	problems, err := promlint.NewWithMetricFamilies(slices.Collect(maps.Values(families))).Lint()
	m.must(err)
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}

	group := func(name, more string) string { return fmt.Sprintf("{group=%q,netns=%q%s}", name, netns, more) }
	generation := func(name string, n int, more string) string {
		return fmt.Sprintf("{generation=\"%d\",group=%q,netns=%q%s}", n, name, netns, more)
	}
	const q, f, p, d = "udp4-127.0.0.1-443", "udp6-::1-7007", "tcp4-127.0.0.1-80", "udp4-127.0.0.1-53"
	got.want(t, "instar_collection_success", scraped{"{}": 1})
	got.want(t, "instar_group_readable", scraped{group(q, ""): 1, group(f, ""): 1, group(p, ""): 1, group(d, ""): 1, group("udp4-strange", ""): 0})
	got.want(t, "instar_group_active_generation", scraped{group(q, ""): 2, group(f, ""): 1, group(p, ""): 1, group(d, ""): 0})
	got.want(t, "instar_group_generations_limit", scraped{group(q, ""): 4, group(f, ""): 4, group(p, ""): 4, group(d, ""): 4})
	got.want(t, "instar_group_flows_limit", scraped{group(q, ""): 64, group(f, ""): 64})
	got.want(t, "instar_group_flow_timeout_seconds", scraped{group(f, ""): 90})
	got.want(t, "instar_group_flows_ended", scraped{group(f, ""): 0})
	got.want(t, "instar_group_flows_evicted_total", scraped{group(f, ""): 0})
	got.want(t, "instar_generation_flows", scraped{generation(f, 1, ""): 2})
	got.want(t, "instar_generation_sockets", scraped{
		generation(q, 1, ""): 2, generation(q, 2, ""): 2, generation(q, 3, ""): 2, generation(f, 1, ""): 2, generation(p, 1, ""): 2})
	got.want(t, "instar_generation_packets_total", scraped{
		generation(q, 1, ""): 3, generation(q, 2, ""): 2, generation(q, 3, ""): 0, generation(f, 1, ""): 2})
	got.want(t, "instar_generation_connections_total", scraped{generation(p, 1, ""): 1})
	for name, connections := range got.named("instar_group_connections_total") {
		want := 0.0
		if name == group(p, `,verdict="new"`) {
			want = 1
		}
		if connections != want {
			t.Errorf("instar_group_connections_total%s is %v", name, connections)
		}
	}
	var sum float64
	for name, packets := range got.named("instar_group_packets_total") {
		if strings.Contains(name, q) {
			sum += packets
		}
	}
	if sum != 5 {
		t.Errorf("the verdicts of %s add up to %v packets, want 5", q, sum)
	}
	states := got.named("instar_generation_state")
	for n, state := range map[int]string{1: "draining", 2: "active", 3: "staged"} {
		for _, s := range []string{"staged", "active", "draining"} {
			if got := states[generation(q, n, fmt.Sprintf(",state=%q", s))]; got != truth(s == state) {
				t.Errorf("generation %d is %s: %v", n, s, got)
			}
		}
	}
	got.want(t, "instar_group_info", scraped{
		fmt.Sprintf("{address=%q,device=\"\",group=%q,layout=%q,netns=%q,network=%q,program=%q,service=%q,steering=%q}",
			"127.0.0.1:443", q, layout(t, quic), netns, "udp4", program(t, quic), "test", "quic"): 1,
		fmt.Sprintf("{address=%q,device=\"\",group=%q,layout=%q,netns=%q,network=%q,program=%q,service=%q,steering=%q}",
			"[::1]:7007", f, layout(t, flow), netns, "udp6", program(t, flow), "test", "flow"): 1,
		fmt.Sprintf("{address=%q,device=\"\",group=%q,layout=%q,netns=%q,network=%q,program=%q,service=%q,steering=%q}",
			"127.0.0.1:80", p, layout(t, tcp), netns, "tcp4", program(t, tcp), "test", "tcp"): 1,
		fmt.Sprintf("{address=%q,device=\"\",group=%q,layout=%q,netns=%q,network=%q,program=%q,service=%q,steering=%q}",
			"127.0.0.1:53", d, layout(t, dns), netns, "udp4", program(t, dns), "test", "stateless"): 1,
	})
	if got := got.named("instar_generation_deadline_timestamp_seconds")[generation(q, 1, "")]; got < timestamp(deadline)-1 || got > timestamp(deadline)+1 {
		t.Errorf("the deadline is %v, want %v", got, timestamp(deadline))
	}
	if n := len(got.named("instar_generation_superseded_timestamp_seconds")); n != 1 {
		t.Errorf("%d generations were superseded, want 1", n)
	}

	handover := func(socket, more string) string { return fmt.Sprintf("{%ssocket=%q}", more, socket) }
	got.want(t, "instar_handover_up", scraped{handover(socket, ""): 1, handover(nobody, ""): 0})
	got.want(t, "instar_handover_info", scraped{
		handover(socket, fmt.Sprintf("build=\"b7\",name=\"app\",pid=\"%d\",", os.Getpid())): 1})
	got.want(t, "instar_handover_generation", scraped{handover(socket, ""): 1})
	got.want(t, "instar_handover_descriptors", scraped{handover(socket, ""): 1})
	got.want(t, "instar_handover_phase", scraped{
		handover(socket, `phase="starting",`): 0, handover(socket, `phase="active",`): 1, handover(socket, `phase="paused",`): 0,
		handover(socket, `phase="draining",`): 0, handover(socket, `phase="closed",`): 0})
}

func snapshot(t *testing.T, g *dispatch.Group) dispatch.Snapshot {
	t.Helper()
	s, err := g.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func layout(t *testing.T, g *dispatch.Group) string  { return fmt.Sprint(snapshot(t, g).Layout) }
func program(t *testing.T, g *dispatch.Group) string { return snapshot(t, g).Program }

// Generations that are gone are no longer told: labels stay bounded over any number of
// upgrades.
func TestGoneGenerations(t *testing.T) {
	m := newMachine(t)
	g := m.open(dispatch.Options{Address: "127.0.0.1:443"})
	collector := New(Options{Root: m.root})
	var first int
	for i := range 12 {
		n, err := g.Join(1)
		m.must(err)
		m.must(n.Activate())
		got, _ := scrape(t, collector)
		if i == 0 {
			first = len(got)
		}
		if len(got) != first {
			t.Fatalf("%d series in generation %d, and %d in generation 1", len(got), n.Number(), first)
		}
		want := fmt.Sprintf("generation=\"%d\"", n.Number())
		for series := range got.named("instar_generation_sockets") {
			if !strings.Contains(series, want) {
				t.Errorf("%s is told, %s is the only one", series, want)
			}
		}
		m.must(n.Close())
	}
}

// Flows are counted as often as Options.FlowsEvery says, not with every scrape.
func TestFlowsEvery(t *testing.T) {
	m := newMachine(t)
	g := m.open(dispatch.Options{Address: "127.0.0.1:7007", Steering: dispatch.SteeringFlow})
	m.join(g, true)
	now := time.Now()
	collector := New(Options{Root: m.root})
	collector.now = func() time.Time { return now }
	want := func(flows, at float64) {
		t.Helper()
		got, _ := scrape(t, collector)
		for metric, want := range map[string]float64{"instar_generation_flows": flows, "instar_group_flows_counted_timestamp_seconds": at} {
			values := slices.Collect(maps.Values(got.named(metric)))
			if !slices.Equal(values, []float64{want}) {
				t.Errorf("%s is %v, want %v", metric, values, want)
			}
		}
	}
	m.send(g, 1)
	began := timestamp(now)
	want(1, began)
	m.send(g, 1)
	now = now.Add(DefaultFlowsEvery - time.Nanosecond)
	want(1, began)
	now = now.Add(time.Nanosecond)
	want(2, timestamp(now))
	m.send(g, 1)
	now = now.Add(-time.Hour) // the clock was set back
	want(3, timestamp(now))

	got, _ := scrape(t, New(Options{Root: m.root, FlowsEvery: -1}))
	if flows := got.named("instar_generation_flows"); len(flows) > 0 {
		t.Errorf("flows were counted: %v", flows)
	}
	// What was counted of groups that are gone is forgotten.
	if len(collector.counted) != 1 {
		t.Errorf("%d counts are kept", len(collector.counted))
	}
	collector.o.Root = filepath.Join(m.root, "none")
	scrape(t, collector)
	if len(collector.counted) != 0 {
		t.Errorf("%d counts are kept of groups that are gone", len(collector.counted))
	}
}

// A counter does not go back, but with a group that is made in the place of another one.
func TestEvictions(t *testing.T) {
	m := newMachine(t)
	g := m.open(dispatch.Options{Address: "127.0.0.1:7007", Steering: dispatch.SteeringFlow})
	m.join(g, true)
	const flows, room = 150, 64
	for range flows {
		m.send(g, 1)
	}
	collector := New(Options{Root: m.root, FlowsEvery: time.Nanosecond})
	evicted := func() float64 {
		t.Helper()
		got, _ := scrape(t, collector)
		values := slices.Collect(maps.Values(got.named("instar_group_flows_evicted_total")))
		if len(values) != 1 {
			t.Fatalf("%v", values)
		}
		return values[0]
	}
	first := evicted()
	if first < flows-room || first > flows {
		t.Errorf("%v of %d flows were evicted of a table of %d", first, flows, room)
	}
	change := func(f func(*counts)) {
		for name, n := range collector.counted {
			f(&n)
			collector.counted[name] = n
		}
	}
	change(func(n *counts) { n.Evicted += 7 })
	if got := evicted(); got != first+7 {
		t.Errorf("%v were evicted, %v before", got, first+7)
	}
	change(func(n *counts) { n.packets = flows + 1 }) // that one was of another group
	if got := evicted(); got != first {
		t.Errorf("%v were evicted of a new group, want %v", got, first)
	}
}

// Groups can be named by their folders, and those of this process be read without pins.
func TestSomeGroups(t *testing.T) {
	m := newMachine(t)
	one := m.open(dispatch.Options{Address: "127.0.0.1:443"})
	m.open(dispatch.Options{Address: "127.0.0.1:444"})
	h, err := handover.New(handover.Options{})
	m.must(err)
	t.Cleanup(func() { m.must(h.Close()) })
	pinless, err := dispatch.Open(dispatch.Options{Address: "[::1]:445", Files: h, Steering: dispatch.SteeringFlow, FlowEntries: 64})
	m.must(err)
	t.Cleanup(func() { m.must(pinless.Close()) })
	m.join(pinless, true)

	readable := func(o Options) []string {
		o.Root = m.root
		got, _ := scrape(t, New(o))
		return slices.Sorted(maps.Keys(got.named("instar_group_readable")))
	}
	netns := filepath.Base(filepath.Dir(one.Path()))
	series := func(netns, group string) string { return fmt.Sprintf("{group=%q,netns=%q}", group, netns) }
	for _, c := range []struct {
		name    string
		options Options
		want    []string
	}{
		{"all", Options{}, []string{series(netns, "udp4-127.0.0.1-443"), series(netns, "udp4-127.0.0.1-444")}},
		{"a path, twice", Options{Paths: []string{one.Path(), one.Path() + "/"}}, []string{series(netns, "udp4-127.0.0.1-443")}},
		{"a path that is not there", Options{Paths: []string{m.root + "/1/udp4-x"}}, []string{series("1", "udp4-x")}},
		{"groups of this process", Options{Groups: []*dispatch.Group{one, pinless}},
			[]string{series(netns, "udp4-127.0.0.1-443"), series("", "udp6-::1-445")}},
	} {
		if got := readable(c.options); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	got, _ := scrape(t, New(Options{Groups: []*dispatch.Group{pinless}}))
	got.want(t, "instar_generation_flows", scraped{`{generation="1",group="udp6-::1-445",netns=""}`: 0})
}

func TestNoBPFFS(t *testing.T) {
	got, families := scrape(t, New(Options{Root: filepath.Join(t.TempDir(), "instar")}))
	got.want(t, "instar_collection_success", scraped{"{}": 0})
	if len(families) != 2 {
		t.Errorf("%d metrics, want the two of the collection", len(families))
	}
}

// The name of a process can be any bytes.
func TestBytesInLabels(t *testing.T) {
	m := generationInfo.of(1, "n", "g", "1", "b", "2", "a\xffb")
	var got dto.Metric
	if err := m.Write(&got); err != nil {
		t.Fatal(err)
	}
	for _, l := range got.GetLabel() {
		if l.GetName() == "command" && l.GetValue() != "a\uFFFDb" {
			t.Errorf("command is %q", l.GetValue())
		}
	}
}

// Handler and Write tell the same.
func TestExpose(t *testing.T) {
	m := newMachine(t)
	g := m.open(dispatch.Options{Address: "127.0.0.1:443"})
	m.join(g, true)
	c := New(Options{Root: m.root})
	start := time.Now()
	c.now = func() time.Time { return start }

	var text bytes.Buffer
	m.must(Write(&text, c))
	response := httptest.NewRecorder()
	Handler(c).ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	// The kernel's clock is read anew each time: instants can differ by a rounding.
	withoutInstants := func(text string) string {
		lines := slices.Collect(strings.Lines(text))
		return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "_timestamp_seconds{") }), "")
	}
	if served, written := withoutInstants(response.Body.String()), withoutInstants(text.String()); served != written {
		t.Errorf("served:\n%s\nwritten:\n%s", served, written)
	}
	if kind := response.Header().Get("Content-Type"); !strings.HasPrefix(kind, "text/plain; version=0.0.4") {
		t.Errorf("the content type is %q", kind)
	}
	if !strings.Contains(text.String(), "# TYPE instar_generation_packets_total counter\n") {
		t.Errorf("no counter:\n%s", text.String())
	}
	problems, err := promlint.New(&text).Lint()
	m.must(err)
	if len(problems) > 0 {
		t.Errorf("promlint: %v", problems)
	}
}

// BenchmarkThousandGroups is a scrape of a thousand groups of one generation each.
func BenchmarkThousandGroups(b *testing.B) {
	testutil.NeedRoot(b)
	testutil.NetNS(b)
	root := filepath.Join(testutil.BPFFS(b), "instar")
	for i := range 1000 {
		g, err := dispatch.Open(dispatch.Options{Address: fmt.Sprintf("127.0.0.1:%d", 1024+i), Service: "test", Root: root,
			Steering: dispatch.SteeringFlow, MaxGenerations: 4, Workers: 4, FlowEntries: 64})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = g.Close() })
		n, err := g.Join(1)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = n.Close() })
		if err := n.Activate(); err != nil {
			b.Fatal(err)
		}
	}
	c := New(Options{Root: root, FlowsEvery: time.Hour})
	for b.Loop() {
		if err := Write(io.Discard, c); err != nil {
			b.Fatal(err)
		}
	}
}
