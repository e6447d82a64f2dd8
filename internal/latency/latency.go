// SPDX-License-Identifier: Apache-2.0

// Package latency collects how long things took.
package latency

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Summary is in milliseconds.
type Summary struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// Reservoir is a uniform sample of durations with their exact maximum. The zero value is
// empty. It is not for several goroutines at once.
type Reservoir struct {
	seen int
	kept []time.Duration
	max  time.Duration
}

// size is how many durations a Reservoir keeps.
const size = 1 << 17

// Add records one.
func (v *Reservoir) Add(d time.Duration) {
	v.seen++
	v.max = max(v.max, d)
	if len(v.kept) < size {
		v.kept = append(v.kept, d)
	} else if i := rand.IntN(v.seen); i < size {
		v.kept[i] = d
	}
}

// Summary describes what was recorded.
func (v *Reservoir) Summary() Summary {
	if v.seen == 0 {
		return Summary{}
	}
	slices.Sort(v.kept)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	at := func(q float64) float64 { return ms(v.kept[int(q*float64(len(v.kept)-1))]) }
	return Summary{P50: at(0.5), P99: at(0.99), Max: ms(v.max)}
}
