// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"bytes"
	"io"
	"testing"
	"time"

	"instar/internal/testutil"
)

// TestScenarios plays each with a moderate load. What it shows is in the
// outcome; here it is checked once more, from the numbers.
func TestScenarios(t *testing.T) {
	testutil.NeedRoot(t)
	for _, s := range scenarios {
		t.Run(s.letter, func(t *testing.T) {
			o := Options{Scenarios: []string{s.letter}, Upgrades: 2, Rate: 300, KeepAlive: 50}
			if s.letter == "b" {
				// Each time there is a chance that the queue is empty.
				o.Upgrades, o.Rate = 3, 600
			}
			report, err := Run(t.Context(), o, program, t.Output(), func(p Progress) {
				if p.Text != "" {
					t.Logf("%6.3f %s", p.At.Seconds(), p.Text)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if len(report.Scenarios) != 1 || report.Scenarios[0].Scenario != s.letter {
				t.Fatalf("scenarios: %+v", report.Scenarios)
			}
			upgrades := 1
			if s.upgrades {
				upgrades = o.Upgrades
			}
			checkOutcome(t, &report.Scenarios[0], upgrades)
		})
	}
}

func checkOutcome(t *testing.T, o *Outcome, upgrades int) {
	t.Helper()
	t.Logf("%+v", o)
	if !o.OK || len(o.Problems) > 0 {
		t.Errorf("not as it should be: %s; %q; %q", o.Verdict, o.Problems, o.Examples)
	}
	if o.Kinds[KindNew].Requests == 0 || o.Kinds[KindKeepAlive].Requests == 0 {
		t.Errorf("requests: %+v", o.Kinds)
	}
	if o.Upgrades != upgrades || len(o.Servers) != upgrades+1 {
		t.Errorf("%d upgrades, %d servers, want %d upgrades", o.Upgrades, len(o.Servers), upgrades)
	}
	for _, p := range o.Servers {
		if p.ExitCode != 0 || o.Generations[p.Generation].Requests == 0 {
			t.Errorf("generation %d: exit code %d, %+v", p.Generation, p.ExitCode, o.Generations[p.Generation])
		}
	}
	facts := map[string]map[string]int64{
		"e": {"in_flight": longCount, "finished": longCount, "accepted_after_ready": 0, "exit_code": 0},
		"f": {"served_by_others": 0},
	}
	for name, want := range facts[o.Scenario] {
		if got, ok := o.Facts[name]; !ok || got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	switch o.Scenario {
	case "a":
		if o.Refused == 0 {
			t.Error("no connection was refused")
		}
	case "b":
		if o.Reset == 0 || o.Facts["waiting_at_close"] == 0 || o.Refused > 0 {
			t.Errorf("%d resets, %d waited in the queue, %d refused", o.Reset, o.Facts["waiting_at_close"], o.Refused)
		}
	default:
		if o.Lost != 0 || o.ToldToClose == 0 {
			t.Errorf("%d lost, %d connections moved", o.Lost, o.ToldToClose)
		}
	}
	if o.Scenario == "d" && o.Facts["served_meanwhile"] == 0 || o.Scenario == "f" && o.Facts["served_alone"] == 0 {
		t.Errorf("%v", o.Facts)
	}
}

func TestJudge(t *testing.T) {
	refuses, keeps := scenarios[0], scenarios[2]
	for _, tc := range []struct {
		s       scenario
		o       Outcome
		ok      bool
		verdict string
	}{
		{refuses, Outcome{Result: Result{Counts: Counts{Requests: 1, Refused: 2, Lost: 2}}}, true, "2 connections refused, as expected"},
		{refuses, Outcome{Result: Result{Counts: Counts{Requests: 1, Reset: 2, Lost: 2}}}, false, "no connections refused, where some were expected"},
		{keeps, Outcome{Result: Result{Counts: Counts{Requests: 1}, Raced: 1}}, true, "nothing lost"},
		{keeps, Outcome{Result: Result{Counts: Counts{Requests: 1, Lost: 1}}}, false, "1 lost"},
		{keeps, Outcome{}, false, "nothing was answered"},
		{keeps, Outcome{Result: Result{Counts: Counts{Requests: 1}}, Problems: []string{"x"}}, false, "nothing lost; x"},
	} {
		p := &player{scenario: tc.s, outcome: tc.o}
		p.judge()
		if p.outcome.OK != tc.ok || p.outcome.Verdict != tc.verdict {
			t.Errorf("%+v: %v, %s", tc.o.Counts, p.outcome.OK, p.outcome.Verdict)
		}
	}
}

func TestLongestPause(t *testing.T) {
	zero := time.Now()
	at := func(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }
	p := &player{}
	for _, ms := range []int{-50, 10, 40, 30, 70, 500} {
		p.answers = append(p.answers, Answer{Ended: at(ms)})
	}
	for until, want := range map[int]time.Duration{100: 30, 120: 50, 500: 430} {
		if got := p.longestPause(zero, at(until)); got != want*time.Millisecond {
			t.Errorf("until %d: %v, want %d ms", until, got, want)
		}
	}
}

func TestOptions(t *testing.T) {
	o, err := Options{}.WithDefaults()
	if err != nil || len(o.Scenarios) != 6 || o.Upgrades != DefaultUpgrades || o.Rate != DefaultRate || o.KeepAlive != DefaultKeepAlive {
		t.Errorf("%+v, %v", o, err)
	}
	for _, o := range []Options{
		{Upgrades: -1}, {Upgrades: 51}, {Rate: -1}, {Rate: 0.5}, {Rate: 5001}, {KeepAlive: -1}, {KeepAlive: 5001},
		{Scenarios: []string{"a", "g"}}, {Scenarios: []string{""}},
	} {
		if _, err := o.WithDefaults(); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}

// What people would get who start the parts by hand.
func TestByHand(t *testing.T) {
	var stderr bytes.Buffer
	for _, args := range [][]string{nil, {"{"}, {"{}"}, {`{"Mode":"instar","Addr":"127.0.0.1:0"}`}} {
		if code := ServerMain(t.Context(), args, io.Discard, &stderr); code != 1 || stderr.Len() == 0 {
			t.Errorf("%q: exit code %d, %s", args, code, &stderr)
		}
		stderr.Reset()
	}
	if code := Sandbox(t.Context(), nil); code != 2 {
		t.Errorf("sandbox: exit code %d", code)
	}
}
