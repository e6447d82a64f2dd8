// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// tiny measures everything once. Its numbers mean nothing.
var tiny = options{json: true, rounds: 2, packets: batchSize, throughputRounds: 1, flips: 4, repeats: 1}

// benchProgram measures in the namespace that it is started in; the argument is the
// folder of the groups. It sends the report as one line.
var benchProgram = testutil.NewProgram("bench", func(c *testutil.Conversation) error {
	r, err := measure(context.Background(), c.Args[0], tiny)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := tiny.print(&b, r); err != nil {
		return err
	}
	var line bytes.Buffer
	if err := json.Compact(&line, b.Bytes()); err != nil {
		return err
	}
	c.Send("%s", line.String())
	return nil
})

// TestReport runs a bench that is too short to measure anything, and wants every row.
func TestReport(t *testing.T) {
	testutil.NeedRoot(t)
	root := filepath.Join(testutil.BPFFS(t), "instar")
	p := benchProgram.Start(t, testutil.Options{NS: testutil.OtherNetNS(t), Args: []string{root}, Timeout: 2 * time.Minute})
	line := p.Recv()
	if code := p.Wait(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	var r Report
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		t.Fatalf("%v in %s", err, line)
	}

	if r.Version != reportVersion || r.Machine.Kernel == "" || r.Machine.CPU == "" || r.Machine.CPUs < 1 || r.Machine.Go == "" {
		t.Errorf("machine: %+v", r.Machine)
	}

	var rows []string
	for i, c := range r.PacketCosts {
		rows = append(rows, c.Program+": "+c.Packets+": "+c.Verdict)
		if c.Count != uint64(tiny.rounds*tiny.packets) {
			t.Errorf("%s, %s: %d packets", c.Program, c.Packets, c.Count)
		}
		// Differences of so few packets may be anything.
		if i == 0 && c.Net.Min <= 0 || c.Net.Min == 0 || c.Net.Min > c.Net.Median || c.Net.Median > c.Net.Max {
			t.Errorf("%s, %s: %+v", c.Program, c.Packets, c.Net)
		}
	}
	want := []string{
		"empty: any: ", "select: any: ", "stateless: any: new", "quic: short header, our ID: owner",
		"quic: short header, unknown ID: unknown", "quic: Initial, known: known", "quic: Initial, new: new",
		"flow: known: known", "flow: known, one of a million: known", "wireguard: data, known index: known",
		"custom: 12 instructions of classic BPF, our cookie: owner", "tcp: connection: new",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("packet costs: %q, want %q", rows, want)
	}

	rows = nil
	for _, p := range r.Programs {
		rows = append(rows, p.Name)
		if p.Verified <= 0 || p.JITed <= 0 {
			t.Errorf("program: %+v", p)
		}
	}
	if want := []string{"stateless", "quic", "flow", "wireguard", "custom", "tcp"}; !slices.Equal(rows, want) {
		t.Errorf("programs: %q, want %q", rows, want)
	}

	rows = nil
	for _, x := range r.Throughputs {
		rows = append(rows, x.Program+": "+x.Way)
		if x.Plain.Min <= 0 || x.With.Min <= 0 || x.Ratio.Min <= 0 {
			t.Errorf("throughput: %+v", x)
		}
	}
	want = []string{"plain: one CPU for all", "empty: one CPU for all", "stateless: one CPU for all", "quic: one CPU for all"}
	if runtime.NumCPU() > 1 {
		want = append(want, "plain: a CPU for the loop", "empty: a CPU for the loop", "stateless: a CPU for the loop", "quic: a CPU for the loop")
	}
	if !slices.Equal(rows, want) {
		t.Errorf("throughputs: %q, want %q", rows, want)
	}

	rows = nil
	for _, o := range r.Operations {
		rows = append(rows, o.Name)
		if o.Count < 1 || o.P50 < 0 || o.P50 > o.P99 || o.P99 > o.Max || o.Max <= 0 {
			t.Errorf("operation: %+v", o)
		}
	}
	want = []string{
		"create a group (quic)", "open an existing group", "join, sockets: 1", "join, sockets: 64",
		"join, sockets: 256", "flip (Activate)", "of a flip, the store",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("operations: %q, want %q", rows, want)
	}

	var table bytes.Buffer
	if err := r.write(&table); err != nil {
		t.Fatal(err)
	}
	for _, c := range r.PacketCosts {
		if !strings.Contains(table.String(), c.Packets) {
			t.Errorf("table has no %q:\n%s", c.Packets, table.String())
		}
	}
}

// TestOutside: nothing is mounted and no device is brought up in the namespaces of the
// machine.
func TestOutside(t *testing.T) {
	testutil.NeedRoot(t)
	_, _, err := enter()
	if err == nil || !strings.Contains(err.Error(), "scripts/bench") {
		t.Errorf("enter: %v, want an error that names scripts/bench", err)
	}
}

// TestScript: the script finds its program, and hands it its arguments.
func TestScript(t *testing.T) {
	testutil.NeedRoot(t)
	out, err := exec.CommandContext(t.Context(), "../../scripts/bench", "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !strings.Contains(string(out), "-json") {
		t.Errorf("--help prints %q", out)
	}
}

func TestArguments(t *testing.T) {
	if o, err := parse(nil, t.Output()); err != nil || o.rounds < 1 || o.flips < 2000 {
		t.Errorf("defaults: %+v, %v", o, err)
	}
	if o, err := parse([]string{"--json", "-packets", "64"}, t.Output()); err != nil || !o.json || o.packets != 64 {
		t.Errorf("flags: %+v, %v", o, err)
	}
	for _, wrong := range [][]string{{"x"}, {"-packets", "33"}, {"-packets", "0"}, {"-rounds", "0"}, {"-flips", "1"}, {"-what"}} {
		if _, err := parse(wrong, t.Output()); err == nil {
			t.Errorf("%q are taken", wrong)
		}
	}
}

func TestSpread(t *testing.T) {
	got := spread([]float64{5, 1, 3, 2, 4})
	if want := (Spread{Median: 3, Min: 1, Max: 5, P25: 2, P75: 4}); got != want {
		t.Errorf("spread = %+v, want %+v", got, want)
	}
	if got, want := spread([]float64{7}), (Spread{7, 7, 7, 7, 7}); got != want {
		t.Errorf("spread = %+v, want %+v", got, want)
	}
	if got, want := spread([]float64{1, 2}).Median, 1.5; got != want {
		t.Errorf("median = %v, want %v", got, want)
	}
	us := make([]time.Duration, 101)
	for i := range us {
		us[i] = time.Duration(100-i) * time.Microsecond
	}
	if got, want := durations(us), (Durations{101, 50, 99, 100}); !reflect.DeepEqual(got, want) {
		t.Errorf("durations = %+v, want %+v", got, want)
	}
}

func TestVerified(t *testing.T) {
	n, err := verified("func#0 @0\nprocessed 1234 insns (limit 1000000) max_states_per_insn 4\n")
	if n != 1234 || err != nil {
		t.Errorf("verified = %d, %v", n, err)
	}
	if _, err := verified("something else"); err == nil {
		t.Error("a log without the line is taken")
	}
}

func TestRemarks(t *testing.T) {
	good := Spread{Median: 1, P25: 1, P75: 1}
	quiet := Report{
		PacketCosts: []PacketCost{
			{Program: "empty", Packets: anyPackets},
			{Program: "select", Packets: anyPackets, Net: Spread{Median: 35, P25: 34, P75: 36}},
			{Program: "quic", Packets: ourPackets, Net: Spread{Median: 55, P25: 50, P75: 60}},
		},
		Throughputs: []Throughput{{Program: emptyName, Ratio: Spread{Median: 0.9, P25: 0.9, P75: 0.9}}, {Program: "quic", Ratio: good}},
		Operations: []Operation{
			{Name: joinName(256), Durations: Durations{P50: 9999, P99: 1e6}},
			{Name: flipName, Durations: Durations{P50: 40, P99: 49, Max: 1e6}},
		},
	}
	quiet.remark()
	if len(quiet.Notes) != 0 {
		t.Errorf("notes of a quiet machine: %q", quiet.Notes)
	}

	noisy := Report{
		Machine: Machine{CPUs: 1, LoadStart: 3},
		PacketCosts: []PacketCost{
			{Program: "empty", Packets: anyPackets},
			{Program: "select", Packets: anyPackets, Net: Spread{Median: 43}},
			{Program: "quic", Packets: ourPackets, Net: Spread{Median: 100, P25: 80, P75: 120}},
		},
		Throughputs: []Throughput{{Program: "quic", Way: "y", Ratio: Spread{Median: 0.97, P25: 0.9, P75: 1.1}}, {Ratio: good}},
		Operations: []Operation{
			{Name: joinName(256), Durations: Durations{P50: 10001}},
			{Name: flipName, Durations: Durations{P50: 40, P99: 51}},
		},
	}
	noisy.remark()
	wanted := []string{
		"load average was 3.0", "noisy: quic", "noisy: throughput of quic", "100 ns, and 60 is the goal; selecting from an array alone takes 43",
		"0.970 of plain", "join, sockets: 256", "p99 51 us", "one CPU",
	}
	if len(noisy.Notes) != len(wanted) {
		t.Fatalf("notes of a noisy machine with one CPU: %q", noisy.Notes)
	}
	for i, want := range wanted {
		if !strings.Contains(noisy.Notes[i], want) {
			t.Errorf("note %q, want %q in it", noisy.Notes[i], want)
		}
	}
}
