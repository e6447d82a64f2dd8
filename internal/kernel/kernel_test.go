// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		release string
		want    Version
	}{
		{"6.18.44-fc-v782", Version{6, 18}},
		{"5.10.0-34-cloud-amd64", Version{5, 10}},
		{"6.1-rc3+", Version{6, 1}},
		{"6.1", Version{6, 1}},
		{"6.12.0", Version{6, 12}},
		{"4.19.0+", Version{4, 19}},
		{"5.15.167.4-microsoft-standard-WSL2", Version{5, 15}},
		{"6.8.0-1021-aws", Version{6, 8}},
		{"5.14.0-503.el9.x86_64", Version{5, 14}},
		{"10.0rc1", Version{10, 0}},
		{"6.18 with words", Version{6, 18}},
	} {
		got, err := Parse(tc.release)
		if err != nil || got != tc.want {
			t.Errorf("Parse(%q) = %v, %v; want %v", tc.release, got, err, tc.want)
		}
	}
	for _, release := range []string{"", "6", "6.", ".1", "six.one", "6-1", "v6.1", "-6.1", "6.-1", "+6.1", "99999999999999999999.1"} {
		if got, err := Parse(release); err == nil {
			t.Errorf("Parse(%q) = %v; want an error", release, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("6.18.44-fc-v782")
	f.Fuzz(func(t *testing.T, release string) {
		v, err := Parse(release)
		if err != nil {
			return
		}
		if v.Major < 0 || v.Minor < 0 {
			t.Fatalf("Parse(%q) = %v", release, v)
		}
		again, err := Parse(v.String())
		if err != nil || again != v {
			t.Fatalf("Parse(%q) = %v, %v; want %v", v, again, err, v)
		}
	})
}

func TestOrder(t *testing.T) {
	ordered := []Version{{4, 19}, {5, 0}, {5, 9}, {5, 10}, {6, 0}, {6, 18}}
	for i, v := range ordered {
		for j, w := range ordered {
			if got, want := v.AtLeast(w), i >= j; got != want {
				t.Errorf("%v.AtLeast(%v) = %t", v, w, got)
			}
			if got := v.Compare(w); got < 0 != (i < j) || got > 0 != (i > j) {
				t.Errorf("%v.Compare(%v) = %d", v, w, got)
			}
		}
	}
}

func TestCurrent(t *testing.T) {
	v, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(release), v.String()) {
		t.Errorf("Current() = %v, but the release is %s", v, release)
	}
}
