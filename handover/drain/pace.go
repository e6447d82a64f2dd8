// SPDX-License-Identifier: Apache-2.0

package drain

import "time"

// spread deals out closes evenly over what is left of a window, and no more in
// a second than the rate.
type spread struct {
	rate   float64
	last   time.Time
	credit float64
}

// take returns how many of n are due. A zero until means that only the rate
// counts. What the caller could not use it gives back.
func (s *spread) take(now time.Time, n int, until time.Time) int {
	passed := 0.0
	if !s.last.IsZero() {
		passed = now.Sub(s.last).Seconds()
	}
	s.last = now
	if n == 0 {
		s.credit = 0
		return 0
	}
	rate := s.rate
	if left := until.Sub(now).Seconds(); !until.IsZero() && left > 0 {
		rate = min(rate, float64(n)/left)
	}
	s.credit += rate * passed
	due := min(int(s.credit), n)
	s.credit -= float64(due)
	return due
}

func (s *spread) giveBack(n int) { s.credit += float64(n) }

// budget is the number of closes, of whatever kind, that the rate allows since
// it was last asked.
type budget struct {
	rate   float64
	last   time.Time
	credit float64
}

func (b *budget) refill(now time.Time) {
	if !b.last.IsZero() {
		share := b.rate * now.Sub(b.last).Seconds()
		// What was not used earlier is no right to a burst.
		b.credit = min(b.credit+share, share+1)
	}
	b.last = now
}

func (b *budget) spend(n int) int {
	n = max(0, min(n, int(b.credit)))
	b.credit -= float64(n)
	return n
}

// allowed is how many of n clients may have been told to go when elapsed of the
// window has passed: rate in a second, with the first tenth of a second's at
// once, or more where the window is too short for that.
func allowed(n int, elapsed, window time.Duration, rate float64) int {
	if elapsed >= window {
		return n
	}
	rate = max(rate, float64(n)/window.Seconds())
	return min(n, 1+int(rate*(elapsed.Seconds()+0.1)))
}
