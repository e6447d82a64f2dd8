// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"errors"
	"fmt"
	"time"
)

// Method is a way of replacing one server process by the next.
type Method string

const (
	// MethodInstar joins the successor to the group, flips, and lets the
	// predecessor drain.
	MethodInstar Method = "instar"
	// MethodRestart stops the server and then starts the next one.
	MethodRestart Method = "restart"
	// MethodReuseport starts the next one on the same port with SO_REUSEPORT
	// alone, and then stops the predecessor gracefully.
	MethodReuseport Method = "reuseport"
)

// Options say what to run. The zero value is the default demo.
type Options struct {
	// Upgrades is how often the server is replaced. Default 6, at most 200.
	Upgrades int `json:"upgrades"`
	// Connections is the number of persistent connections. Default 200.
	Connections int `json:"connections"`
	// Rate is new connections a second besides. Default 50.
	Rate float64 `json:"rate"`
	// Duration is the time under load of each run. Default: 2.5 s for each
	// upgrade and 6 s more; 1.5 s and 5 s with Compare, which runs three times.
	Duration time.Duration `json:"duration_ns"`
	// Workers is the number of sockets of each server. Default 4.
	Workers int `json:"workers"`
	// Compare adds runs of MethodRestart and MethodReuseport.
	Compare bool `json:"compare"`
	// Seed makes the load repeatable. Default: from the clock.
	Seed uint64 `json:"seed"`
}

// Defaults of Options.
const (
	DefaultUpgrades    = 6
	DefaultConnections = 200
	DefaultRate        = 50
	DefaultWorkers     = 4
)

// shortestInterval is the least time between two upgrades. A predecessor drains
// for longer, and a group has room for 16 generations.
const shortestInterval = time.Second

// leadIn is the time under load before the first upgrade, and leadOut the one
// after the last.
const (
	leadIn  = 2 * time.Second
	leadOut = 3 * time.Second
)

// WithDefaults fills in what is zero and checks the rest.
func (o Options) WithDefaults() (Options, error) {
	if o.Upgrades == 0 {
		o.Upgrades = DefaultUpgrades
	}
	if o.Connections == 0 {
		o.Connections = DefaultConnections
	}
	if o.Rate == 0 {
		o.Rate = DefaultRate
	}
	if o.Workers == 0 {
		o.Workers = DefaultWorkers
	}
	if o.Duration == 0 {
		o.Duration = time.Duration(o.Upgrades)*2500*time.Millisecond + 6*time.Second
		if o.Compare {
			o.Duration = time.Duration(o.Upgrades)*1500*time.Millisecond + 5*time.Second
		}
	}
	if o.Seed == 0 {
		o.Seed = uint64(time.Now().UnixNano())
	}
	shortest := leadIn + leadOut + time.Duration(o.Upgrades-1)*shortestInterval
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.Upgrades >= 1 && o.Upgrades <= 200, "upgrades: %d is not in 1 to 200", o.Upgrades)
	check(o.Connections >= 1 && o.Connections <= 5000, "connections: %d is not in 1 to 5000", o.Connections)
	check(o.Rate > 0 && o.Rate <= 2000, "rate: %g a second is not above 0 and up to 2000", o.Rate)
	check(o.Workers >= 1 && o.Workers <= 64, "workers: %d is not in 1 to 64", o.Workers)
	check(o.Duration >= shortest, "duration: %v is too short for %d upgrades; at least %v", o.Duration, o.Upgrades, shortest)
	check(o.Duration <= time.Hour, "duration: %v is longer than an hour", o.Duration)
	return o, errors.Join(errs...)
}

// Methods are the runs, in their order.
func (o Options) Methods() []Method {
	if o.Compare {
		return []Method{MethodInstar, MethodRestart, MethodReuseport}
	}
	return []Method{MethodInstar}
}

// upgradeAt is when the i-th upgrade (from 0) begins, counted from the start of
// the load: evenly spaced between leadIn and leadOut.
func (o Options) upgradeAt(i int) time.Duration {
	return leadIn + (o.Duration-leadIn-leadOut)*time.Duration(i)/time.Duration(max(1, o.Upgrades-1))
}
