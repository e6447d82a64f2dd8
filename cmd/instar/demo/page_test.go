// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"instar/internal/sandbox"
	"instar/quicdemo"
)

// testReport has a run in which all is well and one in which nothing is.
func testReport() *Report {
	good := Result{
		Method: MethodInstar, Upgrades: 1,
		Result: quicdemo.Result{Seconds: 3, Connections: 1234, Requests: 56789, Migrations: 12, Rebinds: 11, Bytes: 20 << 20,
			Resumed: 5, ZeroRTT: quicdemo.ZeroRTT{Attempted: 5, Accepted: 4},
			Request: quicdemo.Latency{P50: 1.25, P99: 12.5, Max: 250}},
		Servers: []Process{
			{Number: 1, PID: 101, Started: -.2, Active: new(-.1), Replaced: new(1.5), Ended: new(2.5), ExitCode: new(0), Requests: 50000},
			{Number: 2, PID: 102, Started: 1.4, Active: new(1.5), Ended: new(3.1), ExitCode: new(0), Requests: 6789},
		},
		Timeline: []Sample{
			{T: 0, Requests: map[uint32]int64{1: 50}, Packets: map[uint32]uint64{1: 500}},
			{T: .1, Requests: map[uint32]int64{1: 20, 2: 30}, Packets: map[uint32]uint64{1: 200, 2: 300}},
		},
	}
	bad := Result{
		Method: MethodRestart, Upgrades: 1,
		Result: quicdemo.Result{Seconds: 3, Connections: 12, Requests: 34, FailedRequests: 1001, FailedHandshakes: 3, BrokenConnections: 4,
			Errors: map[string]int64{"request: stateless_reset": 1001}},
		ServerFailures: 1,
		Problems:       []string{"generation 1 </script><script>alert(1)</script> & more"},
		Servers:        []Process{{Number: 1, PID: 201, ExitCode: new(1)}},
		Timeline:       []Sample{{T: 0, Requests: map[uint32]int64{1: 34}, Failures: 7}},
	}
	return &Report{
		Started: time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC),
		Options: Options{Upgrades: 1, Connections: 200, Rate: 50, Workers: 4, Compare: true, Seed: 42},
		Host:    sandbox.Host{Kernel: "6.18.0", CPUs: 2, Arch: "amd64"},
		Runs:    []Result{good, bad},
	}
}

func renderPage(t *testing.T, r *Report) string {
	t.Helper()
	var buf bytes.Buffer
	if err := WritePage(&buf, r); err != nil {
		t.Fatal(err)
	}
	return buf.String()
}

// TestPageSelfContained checks that the page needs nothing else: no other
// resource is named, and the policy of the page forbids to load any.
func TestPageSelfContained(t *testing.T) {
	text := renderPage(t, testReport())
	for _, forbidden := range []string{`https?://`, `<link`, `@import`, `url\(`, `\bsrc=`, `\bhref=`, `\bfetch\(`, `XMLHttpRequest`, `import\(`, `//[a-z]+\.`} {
		if at := regexp.MustCompile(forbidden).FindString(text); at != "" {
			t.Errorf("the page has %q", at)
		}
	}
	if !strings.Contains(text, `http-equiv="Content-Security-Policy" content="default-src 'none'`) {
		t.Error("no policy that forbids other resources")
	}
	for _, want := range []string{`<meta name="viewport"`, `prefers-color-scheme: dark`, "<noscript>"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
}

// TestPageData checks that the page holds the numbers: as text, and as data for
// the timeline, which no content can break out of.
func TestPageData(t *testing.T) {
	report := testReport()
	text := renderPage(t, report)
	for _, want := range []string{
		"<h1>Nothing lost</h1>", "replaced once by a new process", "56,789", "1,234", "20 MiB", "12.5 ms", "Linux 6.18.0", "seed 42",
		`<td class="bad">1,001</td>`, "1 upgrade, 34 requests, 1,001 failed requests, 3 failed handshakes, 4 broken connections", "3 February 2026",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(text, "alert(1)</script>") {
		t.Error("a problem's text is not escaped")
	}
	_, data, _ := strings.Cut(text, `<script type="application/json" id="data">`)
	data, _, _ = strings.Cut(data, "</script>")
	var got pageData
	if err := json.Unmarshal([]byte(data), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Runs) != 2 || got.Step != .1 {
		t.Fatalf("%d runs with steps of %v", len(got.Runs), got.Step)
	}
	for i := range report.Runs {
		want := report.Runs[i]
		if diff := cmp.Diff(want.Timeline, got.Runs[i].Timeline); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(want.Servers, got.Runs[i].Servers); diff != "" {
			t.Error(diff)
		}
		if got.Runs[i].Lost() != want.Lost() {
			t.Errorf("%d lost, want %d", got.Runs[i].Lost(), want.Lost())
		}
	}
}

// TestPageOfOneRun checks that a demo without --compare has no comparison, and
// that a loss is in the title.
func TestPageOfOneRun(t *testing.T) {
	report := testReport()
	report.Runs = report.Runs[1:]
	text := renderPage(t, report)
	if strings.Contains(text, "<table>\n") {
		t.Error("a table compares one run")
	}
	if !strings.Contains(text, `<h1 class="bad">1,008 lost</h1>`) {
		t.Error("no verdict")
	}
}

func TestWriteTable(t *testing.T) {
	var buf bytes.Buffer
	if err := WriteTable(&buf, testReport()); err != nil {
		t.Fatal(err)
	}
	text := buf.String()
	for _, want := range []string{
		`(?m)^ +instar +restart$`, `(?m)^ +requests +56,789 +34$`, `(?m)^ +failed requests +0 +1,001$`,
		`(?m)^ +request p99 +12\.5 ms +0\.0 ms$`, `(?m)^  1,001 x request: stateless_reset$`, `(?m)^instar: nothing lost\.$`,
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

// TestWriteTableInterrupted checks that a table says what it is not the whole of.
func TestWriteTableInterrupted(t *testing.T) {
	for _, c := range []struct {
		change func(*Report)
		want   string
	}{
		{func(r *Report) { r.Runs[0].Interrupted = true; r.Runs = r.Runs[:1] },
			"\n\ninstar: interrupted after 3.0 s, nothing lost until then.\n"},
		{func(r *Report) { r.Runs[1].Interrupted = true },
			"\n\ninstar: nothing lost.\nrestart: interrupted after 3.0 s.\n"},
		{func(r *Report) { r.Runs = r.Runs[1:]; r.Runs[0].Interrupted = true },
			"\n\nrestart: interrupted after 3.0 s, 1,008 lost until then.\n"},
	} {
		report := testReport()
		c.change(report)
		var buf bytes.Buffer
		if err := WriteTable(&buf, report); err != nil {
			t.Fatal(err)
		}
		if text := buf.String(); !strings.HasSuffix(text, c.want) {
			t.Errorf("no %q in\n%s", c.want, text)
		}
	}
}

// TestMessages checks that a report survives the way from the sandbox.
func TestMessages(t *testing.T) {
	want := testReport()
	var buf bytes.Buffer
	s := sandbox.NewSender(&buf)
	s.Send(message{Event: &Event{Text: "begins"}})
	s.Send(message{Status: &Status{Requests: 7}})
	s.Send(message{Report: newDocument(*want)})
	s.Send(message{Fail: &sandbox.Failure{Text: "x", Environment: true}})
	var events, statuses int
	doc, err := receive(&buf, Hooks{Event: func(Event) { events++ }, Status: func(Status) { statuses++ }})
	if environment, ok := errors.AsType[*sandbox.EnvironmentError](err); !ok || environment.Text != "x" || events != 1 || statuses != 1 {
		t.Errorf("%d events, %d statuses, %v", events, statuses, err)
	}
	if diff := cmp.Diff(*want, doc.report()); diff != "" {
		t.Error(diff)
	}
	if _, err := receive(strings.NewReader(`{"event":`), Hooks{}); err == nil {
		t.Error("half a message is no error")
	}
}

func TestOptions(t *testing.T) {
	o, err := Options{}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if o.Upgrades < 5 || o.Duration > 30*time.Second || o.Seed == 0 {
		t.Errorf("defaults: %+v", o)
	}
	for _, upgrades := range []int{1, 2, 6, 200} {
		o, err := Options{Upgrades: upgrades}.WithDefaults()
		if err != nil {
			t.Fatal(err)
		}
		for i := range upgrades {
			at := o.upgradeAt(i)
			if at < leadIn || at > o.Duration-leadOut || i > 0 && at-o.upgradeAt(i-1) < shortestInterval {
				t.Errorf("upgrade %d of %d at %v of %v", i, upgrades, at, o.Duration)
			}
		}
	}
	_, err = Options{Upgrades: -1, Connections: -1, Rate: -1, Workers: -1, Duration: time.Second}.WithDefaults()
	for _, want := range []string{"upgrades: -1", "connections: -1", "rate: -1", "workers: -1", "duration: "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

func TestOK(t *testing.T) {
	for name, change := range map[string]func(*Result){
		"request":    func(r *Result) { r.FailedRequests = 1 },
		"handshake":  func(r *Result) { r.FailedHandshakes = 1 },
		"connection": func(r *Result) { r.BrokenConnections = 1 },
		"migration":  func(r *Result) { r.FailedMigrations = 1 },
		"server":     func(r *Result) { r.ServerFailures = 1 },
		"no load":    func(r *Result) { r.Requests = 0 },
	} {
		r := testReport().Runs[0]
		if !r.OK() {
			t.Fatal("a good run is not OK")
		}
		if change(&r); r.OK() {
			t.Errorf("%s: a bad run is OK", name)
		}
		if v := verdict(&r); v == "Nothing lost" {
			t.Errorf("%s: %s", name, v)
		}
	}
}

func TestNumbers(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000", -100: "-100"} {
		if got := group(n); got != want {
			t.Errorf("group(%d) = %s", n, got)
		}
	}
	for n, want := range map[int64]string{0: "0 B", 5000: "5,000 B", 20 << 10: "20 KiB", 3 << 30: "3072 MiB", 30 << 30: "30 GiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %s", n, got)
		}
	}
	if times(1) != "once" || times(2) != "twice" || times(3) != "3 times" {
		t.Error("times")
	}
}
