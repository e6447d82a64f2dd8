// SPDX-License-Identifier: Apache-2.0

package latency

import (
	"testing"
	"time"
)

func TestSummary(t *testing.T) {
	var r Reservoir
	if got := r.Summary(); got != (Summary{}) {
		t.Errorf("of nothing: %+v", got)
	}
	for i := 100; i > 0; i-- {
		r.Add(time.Duration(i) * time.Millisecond)
	}
	if got, want := r.Summary(), (Summary{P50: 50, P99: 99, Max: 100}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	// The maximum is exact, also when it is not among those that are kept.
	r.Add(time.Second)
	for range 2 * size {
		r.Add(0)
	}
	if got := r.Summary(); len(r.kept) != size || got.Max != 1000 || got.P50 != 0 {
		t.Errorf("%d kept, %+v", len(r.kept), got)
	}
}
