// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"time"
)

// Spread is how the values of the rounds lie.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	// P25 and P75 hold the middle half.
	P25 float64 `json:"p25"`
	P75 float64 `json:"p75"`
}

func spread(values []float64) Spread {
	s := slices.Sorted(slices.Values(values))
	return Spread{quantile(s, 0.5), s[0], s[len(s)-1], quantile(s, 0.25), quantile(s, 0.75)}
}

// quantile interpolates between the two values next to q, of a sorted list.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// Durations is how long a call took, in microseconds.
type Durations struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50_us"`
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

func durations(d []time.Duration) Durations {
	us := make([]float64, len(d))
	for i, t := range d {
		us[i] = float64(t) / float64(time.Microsecond)
	}
	slices.Sort(us)
	return Durations{len(us), quantile(us, 0.5), quantile(us, 0.99), us[len(us)-1]}
}
