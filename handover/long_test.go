// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"instar/internal/testutil"
)

// A hundred upgrades (ten, unless INSTAR_TEST_LONG is set) under 5,000 new connections
// a second (1,000), and 500 that are kept (100): none is refused, reset or cut, and
// nothing grows from generation to generation (F2, G1).
func TestManyUpgrades(t *testing.T) {
	upgrades, kept, rate := testutil.UnlessShort(10, 3), testutil.UnlessShort(100, 10), testutil.UnlessShort(1000, 50)
	if os.Getenv("INSTAR_TEST_LONG") != "" {
		upgrades, kept, rate = 100, 500, 5500
	}
	s := newService(t, appConfig{Probation: 20 * time.Millisecond, Max: 500, State: 10_000})
	s.up()
	load := s.hasty(16, rate)
	for i := range kept {
		load.keep(fmt.Sprintf("127.1.%d.%d", i/200, i%200+1), 500*time.Millisecond)
	}
	began := time.Now()
	for n := range upgrades {
		if _, err := s.upgrade(); err != nil {
			t.Fatalf("upgrade %d: %v", n, err)
		}
		s.await(0, "the end of the probation", func(e appEvent) bool { return e.What == "superseded" && e.Generation == n+1 })
		settle := func() bool { st, err := s.status(); return err == nil && st.Generation == n+2 && !st.Probation }
		for deadline := time.Now().Add(patience); !settle() && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
	}
	took := time.Since(began)
	load.end()
	if load.lost() > 0 {
		t.Errorf("lost: %d refused, %d reset, %d other: %q", load.refused.Load(), load.reset.Load(), load.other.Load(), load.errors[:min(5, len(load.errors))])
	}
	t.Logf("%d upgrades in %v, %d answers, %.0f/s, from %d processes", upgrades, took.Round(time.Millisecond), load.asked.Load(), float64(load.asked.Load())/took.Seconds(), len(load.by))

	measure := func(generation int) (files, goroutines int, memory int64) {
		e := s.await(0, "a measurement", func(e appEvent) bool { return e.What == "measure" && e.Generation == generation })
		older, err := strconv.Atoi(e.Detail)
		if err != nil {
			t.Fatal(err)
		}
		return e.FDs - older, e.Goroutines, int64(e.Memory)
	}
	files, goroutines, memory := measure(2)
	lastFiles, lastGoroutines, lastMemory := measure(upgrades + 1)
	if d := lastFiles - files; d < -2 || d > 2 {
		t.Errorf("generation 2 had %d descriptors, the last one %d", files, lastFiles)
	}
	if d := lastGoroutines - goroutines; d < -2 || d > 2 {
		t.Errorf("generation 2 had %d goroutines, the last one %d", goroutines, lastGoroutines)
	}
	if lastMemory > memory+1<<20 {
		t.Errorf("generation 2 had %d bytes of heap, the last one %d", memory, lastMemory)
	}
	t.Logf("descriptors %d and %d, goroutines %d and %d, heap %d and %d", files, lastFiles, goroutines, lastGoroutines, memory, lastMemory)
}
