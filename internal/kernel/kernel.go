// SPDX-License-Identifier: Apache-2.0

// Package kernel wraps uname(2): which Linux is running, as a number that can
// be compared.
//
// A version is a hint for messages and for tests ("this must work from 5.14
// on"). Distributions backport: whether something works is found out by
// trying it, not by comparing versions.
package kernel

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Version is the part of a kernel's release that orders features. Patch levels
// are left out: they bring no features.
type Version struct {
	Major, Minor int
}

// Current is the version of the running kernel.
func Current() (Version, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Version{}, fmt.Errorf("read kernel release: %w", err)
	}
	return Parse(unix.ByteSliceToString(u.Release[:]))
}

// Parse reads the release that uname(2) reports. Whatever follows
// MAJOR.MINOR is the builder's and is ignored.
func Parse(release string) (Version, error) {
	major, rest, ok := number(release)
	if !ok || !strings.HasPrefix(rest, ".") {
		return Version{}, fmt.Errorf("parse kernel release %q: want MAJOR.MINOR", release)
	}
	minor, _, ok := number(rest[1:])
	if !ok {
		return Version{}, fmt.Errorf("parse kernel release %q: want MAJOR.MINOR", release)
	}
	return Version{Major: major, Minor: minor}, nil
}

// number splits leading decimal digits off s.
func number(s string) (n int, rest string, ok bool) {
	end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(s)
	}
	n, err := strconv.Atoi(s[:end])
	return n, s[end:], err == nil
}

// Compare is negative when v is older than w, zero when they are the same and
// positive when v is newer.
func (v Version) Compare(w Version) int {
	return cmp.Or(cmp.Compare(v.Major, w.Major), cmp.Compare(v.Minor, w.Minor))
}

// AtLeast reports whether v is w or newer.
func (v Version) AtLeast(w Version) bool { return v.Compare(w) >= 0 }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }
