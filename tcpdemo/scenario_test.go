// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"testing"

	"instar/internal/testutil"
)

// TestScenarios plays each with a moderate load. What it shows is in the
// outcome; here it is checked once more, from the numbers.
func TestScenarios(t *testing.T) {
	testutil.NeedRoot(t)
	for _, s := range scenarios {
		t.Run(s.letter, func(t *testing.T) {
			report, err := Run(t.Context(), Options{Scenarios: []string{s.letter}, Upgrades: 2, Rate: 300, KeepAlive: 50},
				program, t.Output(), func(p Progress) {
					if p.Text != "" {
						t.Logf("%6.3f %s", p.At.Seconds(), p.Text)
					}
				})
			if err != nil {
				t.Fatal(err)
			}
			if len(report.Scenarios) != 1 {
				t.Fatalf("%d scenarios", len(report.Scenarios))
			}
			o := &report.Scenarios[0]
			t.Logf("%+v", o)
			if !o.OK || len(o.Problems) > 0 {
				t.Errorf("not as it should be: %s; %q; %q", o.Verdict, o.Problems, o.Examples)
			}
			if o.Requests == 0 || o.Kinds[KindNew].Requests == 0 || o.Kinds[KindKeepAlive].Requests == 0 {
				t.Errorf("requests: %+v", o.Kinds)
			}
			want := 1 // upgrade
			if s.upgrades {
				want = 2
			}
			if o.Upgrades != want || len(o.Servers) != want+1 {
				t.Errorf("%d upgrades, %d servers, want %d upgrades", o.Upgrades, len(o.Servers), want)
			}
			for _, p := range o.Servers {
				if p.ExitCode != 0 || o.Generations[p.Generation].Requests == 0 {
					t.Errorf("generation %d: exit code %d, %+v", p.Generation, p.ExitCode, o.Generations[p.Generation])
				}
			}
			switch s.letter {
			case "a":
				if o.Refused == 0 {
					t.Error("no connection was refused")
				}
			case "b":
				if o.Reset == 0 || o.Facts["waiting_at_close"] == 0 {
					t.Errorf("%d resets, %d waited in the queue", o.Reset, o.Facts["waiting_at_close"])
				}
			default:
				if o.Lost != 0 {
					t.Errorf("lost %d", o.Lost)
				}
			}
		})
	}
}
