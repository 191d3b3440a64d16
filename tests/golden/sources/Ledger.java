package example.ledger;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/** Entries of an account, (oldest first). */
public final class Ledger implements Iterable<Ledger.Entry> {
    private final List<Entry> entries = new ArrayList<>();
    private static final char OPEN = '(';

    public record Entry(String account, long cents) {}

    @Override
    public java.util.Iterator<Entry> iterator() {
        return entries.iterator();
    }

    public void add(Entry entry) {
        if (entry == null || entry.account().isEmpty()) {
            throw new IllegalArgumentException("an entry needs an account :(");
        }
        entries.add(entry);
    }

    public Map<String, Long> balances() {
        return entries.stream()
            .collect(Collectors.groupingBy(
                Entry::account,
                Collectors.summingLong(Entry::cents)));
    }

    String describe(long cents) {
        // Negative amounts stand in brackets, as accountants write them.
        if (cents < 0) {
            return OPEN + Long.toString(-cents) + ")";
        } else if (cents == 0) {
            return "-";
        }
        return Long.toString(cents);
    }

    public static void main(String[] args) throws Exception {
        Ledger ledger = new Ledger();
        for (String arg : args) {
            String[] parts = arg.split("=", 2);
            ledger.add(new Entry(parts[0], Long.parseLong(parts[1])));
        }
        switch (ledger.entries.size()) {
            case 0:
                System.out.println("nothing (yet)");
                break;
            default:
                ledger.balances().forEach((account, cents) -> {
                    System.out.println(account + ": " + ledger.describe(cents));
                });
        }
    }
}
