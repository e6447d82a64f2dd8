// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestStoreName(t *testing.T) {
	for _, tc := range []struct {
		role       string
		generation int
		want       string
	}{
		{"https", 0, "instar/0/https"},
		{"https", 12, "instar/12/https"},
		{"tcp://[::1]:443", 3, "instar/3/tcp%3a//[%3a%3a1]%3a443"},
		{"a b", 1, "instar/1/a%20b"},
		{"100%", 1, "instar/1/100%25"},
		{`"'\`, 1, "instar/1/%22%27%5c"},
		{"ö\n", 1, "instar/1/%c3%b6%0a"},
		{strings.Repeat("x", maxFDName-len("instar/1/")), 1, "instar/1/" + strings.Repeat("x", maxFDName-len("instar/1/"))},
	} {
		got, err := StoreName(tc.role, tc.generation)
		if err != nil || got != tc.want {
			t.Errorf("StoreName(%q, %d) = %q, %v, want %q", tc.role, tc.generation, got, err, tc.want)
		}
	}
	for _, tc := range []struct {
		role       string
		generation int
		want       string
	}{
		{"", 1, "the role is empty"},
		{"a", -1, "0 or more"},
		{strings.Repeat("x", maxFDName-len("instar/1/")+1), 1, "256 octets, at most 255"},
		{strings.Repeat(":", 100), 1, "309 octets"},
	} {
		if got, err := StoreName(tc.role, tc.generation); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("StoreName(%q, %d) = %q, %v, want %q", tc.role, tc.generation, got, err, tc.want)
		}
	}
}

func TestParseStoreNameRefuses(t *testing.T) {
	for _, name := range []string{
		"", "stored", "unknown", "app.socket", "instar", "instar/", "instar/1", "instar/1/", "instar//a",
		"instar/-1/a", "instar/+1/a", "instar/01/a", "instar/1x/a", "instar/99999999999999999999/a",
		"Instar/1/a", "xinstar/1/a", "instar/1/a%", "instar/1/a%2", "instar/1/%41", "instar/1/%3A", "instar/1/%zz",
		"instar/1/a b", "instar/1/a:b", "instar/1/\xff", "instar/1/" + strings.Repeat("x", 250),
	} {
		if role, generation, ok := ParseStoreName(name); ok {
			t.Errorf("%q is role %q, generation %d", name, role, generation)
		}
	}
}

func TestStoreNameRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		role := rapid.String().Draw(t, "role")
		generation := rapid.IntRange(0, math.MaxInt).Draw(t, "generation")
		name, err := StoreName(role, generation)
		if err != nil {
			if role != "" && 3*len(role)+30 < maxFDName {
				t.Fatal(err)
			}
			return
		}
		if err := checkFDName(name); err != nil {
			t.Fatal(err)
		}
		if r, g, ok := ParseStoreName(name); !ok || r != role || g != generation {
			t.Fatalf("%q: %q, %d, %t", name, r, g, ok)
		}
	})
}

// Whatever it accepts is what StoreName makes.
func FuzzParseStoreName(f *testing.F) {
	for _, name := range []string{"instar/1/https", "instar/0/%3a", "instar/01/a", "stored", "instar/1/%"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		role, generation, ok := ParseStoreName(name)
		if !ok {
			return
		}
		if again, err := StoreName(role, generation); err != nil || again != name {
			t.Errorf("%q is role %q, generation %d, whose name is %q, %v", name, role, generation, again, err)
		}
	})
}

func TestLatest(t *testing.T) {
	var inherited []Descriptor
	for _, name := range []string{
		"web", "instar/2/https", "stored", "instar/10/https", "instar/2/quic", "instar/10/https", "instar/0/admin", "instar/01/https", "instar/9/https", "web",
	} {
		inherited = append(inherited, Descriptor{Name: name})
	}
	latest, stale, others := Latest(inherited)
	show := func(list []Stored) (s string) {
		for _, d := range list {
			s += fmt.Sprintf("%s=%s@%d ", d.Name, d.Role, d.Generation)
		}
		return s
	}
	if got, want := show(latest), "instar/10/https=https@10 instar/2/quic=quic@2 instar/10/https=https@10 instar/0/admin=admin@0 "; got != want {
		t.Errorf("latest: %s\nwant %s", got, want)
	}
	if got, want := show(stale), "instar/2/https=https@2 instar/9/https=https@9 "; got != want {
		t.Errorf("stale: %s\nwant %s", got, want)
	}
	if got, want := fmt.Sprint(others), "[{web <nil>} {stored <nil>} {instar/01/https <nil>} {web <nil>}]"; got != want {
		t.Errorf("others: %s\nwant %s", got, want)
	}
	if latest, stale, others := Latest(nil); latest != nil || stale != nil || others != nil {
		t.Errorf("of nothing: %v, %v, %v", latest, stale, others)
	}
}
